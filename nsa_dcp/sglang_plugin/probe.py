"""What doctor asks of packages that may be broken, each question in a process of its own.

`python -m nsa_dcp.sglang_plugin.probe QUESTION`; the answer is the last line of stdout, JSON. A package that raises,
exits or crashes takes only this process with it, and doctor reports which one it was.
"""

from __future__ import annotations

import importlib
import json
import sys

from nsa_dcp.sglang_plugin.server_command import read_with_sglang


def probe_import(module: str) -> dict[str, object]:
    """Import one module."""
    found = importlib.import_module(module)
    return {"version": str(getattr(found, "__version__", "")), "file": getattr(found, "__file__", None) or ""}


def probe_torch() -> dict[str, object]:
    """What torch sees of the GPUs."""
    import torch

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if devices else None,
        "devices": [{"name": device.name, "sms": device.multi_processor_count} for device in devices],
    }


def probe_plugin() -> dict[str, object]:
    """Load sglang's plugins as a server does, then look for our factories and hooks and check the symbols."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from nsa_dcp.sglang_plugin import resolution
    from nsa_dcp.sglang_plugin.compat import check_symbols
    from nsa_dcp.sglang_plugin.plugin import BACKEND_NAMES, BackendFactory

    missing = [
        f"attention backend {name}"
        for name in BACKEND_NAMES
        if not isinstance(ATTENTION_BACKENDS.get(name), BackendFactory)
    ]
    hooks = (
        (resolution.FIRST_STEP, resolution.check_requested_settings),
        (resolution.LAST_STEP, resolution.check_resolved_settings),
    )
    missing += [f"hook {step}" for step, hook in hooks if hook not in _HOOKS.get(step, ())]
    check_symbols()
    return {"missing": missing}


def main(argv: list[str]) -> int:
    """Answer one question: `import MODULE`, `torch`, `plugin` or `command ARGUMENT...`."""
    question, *words = argv
    if question == "import":
        answer = probe_import(words[0])
    elif question == "torch":
        answer = probe_torch()
    elif question == "plugin":
        answer = probe_plugin()
    elif question == "command":
        answer = read_with_sglang(words)
    else:
        raise ValueError(f"question must be import, torch, plugin or command, got {question!r}")
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
