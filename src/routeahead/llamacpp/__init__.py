"""All that touches llama.cpp and ggml: the load, the eval callback, structs and GGUF files.

Knows tensors and addresses, and hands plain numbers and NumPy arrays on. Must not decide which
experts a token is routed to, nor which of them are in memory.
"""
