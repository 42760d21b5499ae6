"""Ebbtide: an LLM inference engine whose KV cache is larger than the device's memory."""
