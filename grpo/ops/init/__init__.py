"""`grpo init`: a folder of one's own to train from. `files/` is what it may write: a script, and links to configs/ and
launch/, which a wheel holds as files.

The command line alone imports it.
It imports no other package.
"""
