"""The engine: the public class, the streamed model behind it, and what happens at a stop.

Joins llama.cpp's graph, the policies and the experts' bytes. Must not know any single policy, nor
how a struct is laid out.
"""
