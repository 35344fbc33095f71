"""Patches of other libraries, by library: each `Patch` gives a foreign name another value.

A patch changes an attribute of a foreign module, class or shared object for all code of the process.
`tools/foreign_assignments.py` finds such assignments elsewhere. Each module imports its library only when a patch is
applied: an engine's processes load neither TRL nor DeepSpeed.

Not patches, and placed where they are used:

- hooks that Python offers to programs: `sys.excepthook`, `sys.argv`, `sys.path`, `sys.stdout`, `os.environ`, signal
  handlers, `atexit`, filters of logging and warnings;
- overrides in a subclass, and attributes of objects that this project made or was given: a model's loaders, a trainer's
  arguments (`tools/private_names.py` lists the private ones);
- calls, such as a foreign cache's `cache_clear`.
"""
