"""`grpo constraints`: `lists/` is a link to constraints/; a wheel has the two lists as files.

Only the command line imports it; it imports no other package.
"""
