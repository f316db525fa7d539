"""Every Triton kernel compiles for Hopper, GPU or not."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = {
    "_collect_kernel",
    "_dequantise_kernel",
    "_erase_past_kernel",
    "_exchange_partials_kernel",
    "_find_threshold_kernel",
    "_finish_kernel",
    "_gather_index_keys_kernel",
    "_fill_page_table_kernel",
    "_gather_index_pages_kernel",
    "_gather_pages_kernel",
    "_gather_rows_kernel",
    "_group_maxima_kernel",
    "_join_index_pages_kernel",
    "_list_pages_kernel",
    "_localize_contexts_kernel",
    "_localize_kernel",
    "_look_up_slots_kernel",
    "_merge_packed_kernel",
    "_merge_partials_kernel",
    "_pack_latent_kernel",
    "_pack_partials_kernel",
    "_quantise_queries_kernel",
    "_remap_to_gathered_kernel",
    "_scatter_index_keys_kernel",
    "_scatter_kv_kernel",
    "_scatter_plain_kernel",
    "_schedule_kernel",
    "_score_page_kernel",
    "_select_kernel",
    "_take_own_kernel",
    "_unpack_latent_kernel",
    "_unpack_partials_kernel",
}


def test_every_kernel_compiles_for_hopper_without_a_gpu(tmp_path):
    """In a fresh cache, or a kernel compiled by an earlier run would not be compiled now."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parents[1] / "kernels"),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    script = HERE / "compile_for_hopper.py"
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == KERNELS
