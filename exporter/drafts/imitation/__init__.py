"""The imitation draft of FastVLM."""
