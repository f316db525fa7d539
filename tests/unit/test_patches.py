"""Only patches.py changes objects of sglang: told from the source of every other module of the plugin. Runs without
sglang."""

import ast
from pathlib import Path

import pytest

import nsa_dcp.sglang_plugin

PLUGIN = Path(nsa_dcp.sglang_plugin.__file__).parent
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
# Of a list, a dict or a set.
MUTATORS = {"append", "extend", "insert", "update", "setdefault", "pop", "popitem", "clear", "remove", "add", "discard"}
# What other modules set on objects that are not a module's own, and why that changes nothing of sglang's.
WRITTEN = {
    ("admission/advice.py", "advice.changes"): "a string of our own class, before anybody has it",
    ("admission/reading/launch_line.py", "lexer.whitespace_split"): "the standard library's, made there",
    ("admission/reading/launch_parser.py", "setattr(namespace, ...)"): "argparse's result: how an action gives one",
    ("admission/reading/server_command.py", "action.required"): "of a parser made there",
    ("attention/backend.py", "setattr(topk_slots, ...)"): "carried by a forward's tensor, as `_nsa_dcp_prepared`",
    ("attention/cp_backend.py", "self._group"): "a name of ours, in our class",
    ("attention/cp_backend.py", "self._comm_backend"): "the same",
    ("attention/cp_backend.py", "self._buffer"): "the same",
    ("attention/cp_backend.py", "self._wire"): "the same",
    ("attention/wired_backend.py", "self._group"): "the same",
    ("attention/wired_backend.py", "self._comm_backend"): "the same",
    ("attention/wired_backend.py", "self._wire"): "the same",
    ("attention/cp_backend.py", "self.forward_metadata"): "what the method that is overridden there makes",
    ("attention/cp_backend.py", "__setattr__(self.forward_metadata, ...)"): "carried by a forward: `_nsa_dcp_parts`",
    ("attention/idle_steps.py", "layer.dcp_size"): "for the length of a call, and put back",
    ("attention/row_backend.py", "self._group"): "a name of ours, in our class",
    ("attention/row_backend.py", "self._tell_layers"): "the same",
    ("attention/row_backend.py", "self._rule"): "the same",
    ("attention/row_backend.py", "self._buffer"): "the same",
    ("attention/row_backend.py", "__setattr__(self.forward_metadata, ...)"): "carried by a forward: `_nsa_dcp_rows`",
    ("selection/sharded_key_cache.py", "self.dcp_size"): "a name of ours, in our class",
    ("selection/sharded_key_cache.py", "self.dcp_rank"): "the same",
    ("selection/sharded_key_cache.py", "HookRegistry.register"): "called by tests alone: servers refuse sharded keys",
    ("selection/row_split_decode.py", "__setattr__(metadata.attn_metadata, ...)"): "carried: `_nsa_dcp_narrowed`",
}


def imported_from_sglang(tree):
    """Names that a module binds to sglang's modules, classes and functions, wherever it imports them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (alias.asname or alias.name).split(".")[0]
                for alias in node.names
                if alias.name.split(".")[0] == "sglang"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root(node):
    """The name that an expression like `a.b[c].d()` begins with; None if it begins with something else."""
    while not isinstance(node, ast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
        if node is None:
            return None
    return node.id


def written(tree, extended=frozenset()):
    """What a module sets on objects that are not its own: attributes, entries of sglang's containers, registries.

    An attribute of `self` is a class's own, unless the class extends one of sglang's or of `extended`: then it may be
    one that sglang's methods read.
    """
    sglang = imported_from_sglang(tree)
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not {root(base) for base in node.bases} & (sglang | extended):
            own |= {id(inner) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and id(node) in own):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if root(node) in sglang or "__dict__" in ast.unparse(node.value) or root(node) == "vars":
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in SETTERS and node.args:
                found.add(f"{name}({ast.unparse(node.args[0])}, ...)")
            registers = root(node.func) in sglang and name.startswith("register")
            attributes = "__dict__" in ast.unparse(node.func) or root(node.func) == "vars"
            if registers or (name in MUTATORS and (root(node.func) in sglang or attributes)):
                found.add(ast.unparse(node.func))
    return found


def classes_of_ours():
    """Classes of the plugin that extend one of sglang's, and those that extend them."""
    trees = [ast.parse(path.read_text()) for path in PLUGIN.rglob("*.py")]
    ours: set[str] = set()
    while True:
        more = {
            node.name
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            and {root(base) for base in node.bases} & (imported_from_sglang(tree) | ours)
        }
        if more == ours:
            return ours
        ours = more


def test_no_other_module_changes_an_object_of_sglangs():
    ours = classes_of_ours()
    assert {"DcpDeepseekSparseAttnBackend", "CpDcpSparseAttnBackend"} <= ours
    found = {
        (str(path.relative_to(PLUGIN)), target)
        for path in PLUGIN.rglob("*.py")
        if path != PLUGIN / "patches.py"
        for target in written(ast.parse(path.read_text()), ours)
    }
    assert found - set(WRITTEN) == set(), "belongs in patches.py"
    assert set(WRITTEN) - found == set(), "no longer there"


@pytest.mark.parametrize(
    "code",
    [
        "layer.dcp_size = 1",
        "layer.dcp_size += 1",
        "layer.dcp_size: int = 1",
        "a, layer.dcp_size = 1, 2",
        "del layer.dcp_size",
        "for layer.dcp_size in (1, 2): pass",
        "setattr(layer, 'dcp_size', 1)",
        "object.__setattr__(layer, 'dcp_size', 1)",
        "vars(layer)['dcp_size'] = 1",
        "vars(layer).update(dcp_size=1)",
        "layer.__dict__['dcp_size'] = 1",
        "layer.__dict__.update(dcp_size=1)",
        "from sglang.a import B\nB['nsa'] = 1",
        "import sglang.a as b\nb.C['nsa'].d = 1",
        "import sglang.a as b\nb.C.update(nsa=1)",
        "from sglang.a import register_attention_backend\nregister_attention_backend('nsa')(f)",
        "from sglang.a import B\nclass Ours(B):\n    def f(self):\n        self.group = 1",
        "class Ours:\n    def f(self):\n        self.updater.group = 1",
    ],
)
def test_every_way_to_change_an_object_is_seen(code):
    assert len(written(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "class Ours:\n    def f(self):\n        self.group = layer.group",
        "out[rows] = merge(out)",
        "from sglang.a import get_parallel\nsize = get_parallel().size\nrows = [size]\nrows.append(size)",
    ],
)
def test_what_is_ones_own_may_be_changed(code):
    assert written(ast.parse(code)) == set()
