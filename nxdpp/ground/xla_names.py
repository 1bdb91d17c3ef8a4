"""Private names of torch and torch_xla for XLA devices: torch_xla 2.9.0 fits torch 2.9 only, so none will go."""

from nxdpp.ground.names import PrivateName

OPERATORS = PrivateName("torch._C._dispatch_get_all_op_names", "refuses collectives of XLA tensors")
HAS_KERNEL = PrivateName("torch._C._dispatch_has_kernel_for_dispatch_key", "refuses collectives of XLA tensors")
COMMIT_UPDATE = PrivateName("torch._functionalize_commit_update", "keeps the order of an XLA graph's results")
SYNC_VIEW = PrivateName("torch._functionalize_sync", "records views of XLA tensors before a copy")
XLA_HAS_CACHE = PrivateName("torch_xla._XLAC._xla_computation_cache_is_initialized", "keeps compiled XLA graphs")
XLA_COPIES = PrivateName("torch_xla._XLAC._xla_get_cpu_tensors", "copies XLA tensors to the host together")
