"""Nothing that strangers may reach is unpickled by us: see docs/security.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
PICKLING = {"loads", "load", "dumps", "dump", "Unpickler"}
# multiprocessing's connections pickle, too.
OVER_OWN_SOCKETS = {"grpo/engine/host.py", "grpo/engine/process.py", "grpo/engine/requests.py"}
FRAMED_BYTES = "grpo/rollout/turns/messages.py"


def names_in(path: Path) -> set[str]:
    """What a file calls by name that pickles."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            of_pickle = isinstance(node.value, ast.Name) and node.value.id in ("pickle", "marshal", "dill")
            if node.attr in OBJECTS or (of_pickle and node.attr in PICKLING):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("multiprocessing.connection", "pickle"):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {name.name for name in node.names} & OBJECTS
    return found


def test_ranks_and_nodes_exchange_no_pickles() -> None:
    found = {str(path.relative_to(ROOT)): names for path in ROOT.glob("grpo/**/*.py") if (names := names_in(path))}
    others = {name: names for name, names in found.items() if name not in OVER_OWN_SOCKETS}
    assert others == {FRAMED_BYTES: {"Connection"}}
    calls = re.findall(r"self\._framed\.(\w+)", (ROOT / FRAMED_BYTES).read_text())
    assert {*calls} == {"send_bytes", "recv_bytes"}
    assert found.keys() >= OVER_OWN_SOCKETS, "the net catches nothing"
