"""What a layer's router says of an earlier hidden vector, who computes it, and how good it is.

Knows routers through `llamacpp`. Must not know what is done with a ranking.
"""
