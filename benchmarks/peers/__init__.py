"""The engine beside transformers, vLLM and llama.cpp on the same work."""
