from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch_xla") else ["test_*"]
