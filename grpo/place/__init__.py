"""Who is here, and how all end together: launcher, devices, topology, groups, failure record and watch, signals.

Every other room may import it; it imports none.
It must not know engines, weights, prompts or TRL.
"""
