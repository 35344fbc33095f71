"""Identity and location of a process: launcher, devices, topology of its node, log, patches of other libraries.

Every other package may import it; it imports none. It must not know engines, weights, prompts or TRL.
"""
