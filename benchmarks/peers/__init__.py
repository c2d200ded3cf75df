"""The methods that are compared, one module for each library.

A peer takes a task, the watch of its run, and a choice (a rate) or None.  It returns
when its own rule says so; the watch ends it before that by an exception.
"""
