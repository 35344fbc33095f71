"""Every value that this project gives to a name of another library, by library: a `Patch` for each.

A patch changes what other code of the process sees: an attribute of a foreign module, class or object that all share.
`tools/foreign_assignments.py` finds one that stands elsewhere. Each module imports its library when a patch is applied:
an engine's processes load neither TRL nor DeepSpeed.

What is no patch, and stands where it is used:

- hooks that Python has for its program: `sys.excepthook`, `sys.argv`, `sys.path`, `sys.stdout`, `os.environ`, signal
  handlers, `atexit`, filters of logging and warnings;
- overrides in a subclass, and attributes of objects that this project has made or was handed: a model's loaders, a
  trainer's arguments (`tools/private_names.py` lists the private ones);
- calls, such as that of a foreign cache's `cache_clear`.
"""
