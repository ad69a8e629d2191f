"""Pure-torch stand-in for SGLang's CPU kernel package: correct, slow, runs on any CPU.

Only what SGLang 0.5.23 calls for a dense model, with and without EAGLE-3. Importing the package registers the
`torch.ops.sgl_kernel.*` operations; the others are plain functions that SGLang imports by name.
"""

from importlib.metadata import version

from .attention import decode_attention_cpu, extend_attention_cpu
from .cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = version("sglang-kernel-cpu")

# Asked by patches/sglang/*-cpu/0001: these operations need no AMX tile instructions.
RUNS_WITHOUT_AMX = True

__all__ = [
    "RUNS_WITHOUT_AMX",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
