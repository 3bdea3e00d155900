"""Requests from any thread, decoded together by one session."""
