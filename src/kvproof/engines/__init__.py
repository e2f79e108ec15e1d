"""Engines: what runs a whole model on our caches, one module each, imported on first use."""
