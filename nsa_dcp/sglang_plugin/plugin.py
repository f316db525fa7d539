"""What sglang calls in each of its processes: it puts a factory and two hooks in place, and nothing else.

sglang logs an exception from here and goes on without the plugin, so nothing that can fail for a reason of its own is
done here. The factory and the hooks run where raising stops the server, and the factory checks that the hooks are in
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_dcp.sglang_plugin.patches import put_backend_factories, put_resolution_hooks


class BackendFactory:
    """Stands in sglang's registry of attention backends for the factory that was there.

    Args:
        stock: sglang's own factory for the same name; None if it has none.
    """

    def __init__(self, stock: Callable[[Any], Any] | None) -> None:
        self.stock = stock

    def __call__(self, model_runner: Any) -> Any:
        """Return the attention backend of a model runner. Errors: as `startup.build_backend`."""
        from nsa_dcp.sglang_plugin.startup.startup import build_backend

        return build_backend(model_runner, self.stock)


def register() -> None:
    """Put the backend factories and the resolution hooks in place. May be called any number of times."""
    # First: with the factories in place, a failure below is found by them and stops the server.
    put_backend_factories(BackendFactory)
    put_resolution_hooks()
