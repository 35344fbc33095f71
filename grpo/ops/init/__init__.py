"""`grpo init`: a user's own folder to train from. `files/` has its contents: a script, and links to configs/ and
launch/, which a wheel has as files.

Only the command line imports it; it imports no other package.
"""
