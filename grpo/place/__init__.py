"""Who is here, and where: launcher, devices, a node's topology, the log of a process, patches of other libraries.

Every other package may import it; it imports none.
It must not know engines, weights, prompts or TRL.
"""
