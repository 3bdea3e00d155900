"""Sessions: requests in, text out."""
