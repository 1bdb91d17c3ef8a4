"""Private ground: the names of torch, transformers and CPython that these libraries do not promise.

Each library has one table, and no other module of nxdpp uses a private name. An entry says what nxdpp does with the
name. Where a version of the library has lost it, what needs it is refused by that sentence, and all else works.
``tests/ground`` tries each entry on the installed versions.
"""
