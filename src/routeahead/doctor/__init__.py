"""How a model will run on this machine, before it runs: short probes and a model of the rest."""
