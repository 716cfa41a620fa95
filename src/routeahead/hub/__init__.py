"""Models on the Hugging Face hub, and their copies on this machine.

The extra `hub` brings the library; what is here already needs neither it nor a network.
"""
