"""The files that hold a checkpoint's weights, and the tensors that their headers promise; no tensor is read here."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from nsa_dcp.planning.config_fields import printable, read_json_object

# What transformers loads, in this order.
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a header describes it.

    file: where it lies. dtype: safetensors' name of it, as "BF16". shape: its sizes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read the headers of the files that transformers would load.

    Args:
        directory: of a checkpoint.

    Returns:
        Every tensor, by name.

    Raises:
        ValueError: there are no such files, one of them is damaged, or they are not what the index says.
    """
    weight_map = _read_weight_map(directory)
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (directory / name).is_file():
            raise ValueError(f"checkpoint file {directory / name} must exist, since the index names it, got none")
    indexed = {file: [tensor for tensor, named in weight_map.items() if named == file] for file in names}
    if (directory / _ONE_FILE).is_file():
        names = [_ONE_FILE]
    if not names:
        raise ValueError(_describe_no_weights(directory))
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        held = _read_header(directory / name)
        if absent := [tensor for tensor in indexed.get(name, ()) if tensor not in held]:
            raise ValueError(
                f"checkpoint file {directory / name} must hold what {_INDEX} says, got none of {list_some(absent)}"
            )
        if twice := sorted(held.keys() & tensors.keys()):
            raise ValueError(
                f"checkpoint files must each hold tensors of their own, got {list_some(twice)} in {name} and in "
                f"{tensors[twice[0]].file.name} ({directory})"
            )
        tensors |= held
    return tensors


def list_some(names: list[str]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more


def _read_weight_map(directory: Path) -> dict[str, str]:
    path = directory / _INDEX
    if not path.exists():
        return {}
    weight_map = read_json_object(path, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) and name for name in weight_map.values()):
        raise ValueError(f"{path} must map weights to file names, got another weight_map")
    return weight_map


def _describe_no_weights(directory: Path) -> str:
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    if shards:
        return (
            f"model must hold {_ONE_FILE}, or {_INDEX} beside its shards, got {list_some(shards)} without an index in "
            f"{directory}"
        )
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in directory.glob(pattern))
    found = f"{list_some(others)}, which must be converted to safetensors first," if others else "none"
    return f"model must hold *.safetensors weights, got {found} in {directory}"


def _read_header(path: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    _check_size(path)
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {
                name: StoredTensor(path, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint file {path} must be in safetensors format, got another ({error})") from None


def _check_size(path: Path) -> None:
    """Compare a file's size with what its header promises: of a broken download safetensors itself says less."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if header_bytes + 8 > size:
            raise ValueError(f"checkpoint file {path} must be whole, got {size} bytes, less than its header")
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = 8 + header_bytes + max(ends, default=0)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
            raise ValueError(f"checkpoint file {path} must be in safetensors format, got another") from None
    if size != expected:
        raise ValueError(f"checkpoint file {path} must hold {expected} bytes, got {size}: it is truncated or damaged")
