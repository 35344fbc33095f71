"""`grpo constraints`: `lists/` is a link to constraints/, of which a wheel holds the two lists as files.

The command line alone imports it.
It imports no other package.
"""
