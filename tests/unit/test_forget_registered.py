"""Deletion reaches every cache: each class that keeps tenants' data forgets, and is registered where it is built.

A class that keeps anything in a container of its own either defines `forget` or is listed in `KEEPS_NOTHING_DELETED`,
with the reason why deletion need not reach it. Whoever adds one decides, or this fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVED = ("kvstore", "prefill_workers", "decode_workers", "serving")
CACHING = (
    "prefill_workers", "decode_workers", "serving/api", "serving/frontend", "serving/placement", "serving/replicas",
    "serving/routing",
)  # fmt: skip

# Ray Serve deployments: the keeper calls them by handle, and they walk what their process holds.
DEPLOYMENTS = {"Ingress", "PrefillWorker", "PatchCompiler", "Retriever"}
WALKERS = {"CacheGroup", "ForgetRegistry"}

IN_FLIGHT = "what requests and steps under way hold, and no longer than they last"
COUNTS = "numbers and names, no content"
KEEPS_NOTHING_DELETED = {
    "AnswerPulls": IN_FLIGHT + ": what is read under way; what was forgotten meanwhile is not named",
    "AnswerStream": IN_FLIGHT,
    "DecodeEngine": IN_FLIGHT + ": answers that are handed back",
    "DeviceCache": "copies of records in the library's memory, which end with them",
    "DeviceTimer": IN_FLIGHT + ": times of calls",
    "RankCalls": IN_FLIGHT + ": times of calls",
    "Admission": IN_FLIGHT,
    "BlockPool": IN_FLIGHT,
    "Compactor": IN_FLIGHT + ": importance of tokens by link",
    "EncodeQueue": IN_FLIGHT,
    "EndedPulls": IN_FLIGHT + ": names of pulls",
    "LinkLease": IN_FLIGHT + ": choices of an answer that were pulled",
    "LinkedEngineClient": IN_FLIGHT + ": answers that prefill workers are being told of",
    "FileSearch": IN_FLIGHT,
    "Scheduler": IN_FLIGHT,
    "Ordering": IN_FLIGHT,
    "PrefillLoop": IN_FLIGHT,
    "RayRoles": IN_FLIGHT,
    "Reachability": IN_FLIGHT,
    "OpenedPdf": IN_FLIGHT,
    "RequestEncoder": IN_FLIGHT,
    "RoundLog": IN_FLIGHT,
    "RoundsParser": IN_FLIGHT,
    "ShadowChecks": IN_FLIGHT,
    "SingleFlightEncoder": IN_FLIGHT,
    "_Exact": IN_FLIGHT,
    "_Opened": IN_FLIGHT,
    "PatchCompiler": "pools patches of jobs under way; the libraries of its process delete the rest",
    "PathWorker": "an offline run, which holds the sets that its user named and ends",
    "DecodePolicy": COUNTS + ": names of replicas",
    "Demand": COUNTS,
    "FairQueue": COUNTS + ": answers in progress by tenant",
    "Limit": COUNTS + ": requests in progress by tenant",
    "RateLimits": COUNTS + ": what is left of tenants' limits",
    "Fidelity": COUNTS,
    "FidelityKeeper": COUNTS,
    "Harvester": COUNTS + ": keys of patches sent lately",
    "LazyAttention": COUNTS + ": leaders of layers",
    "LibraryKeeper": "the deletions that are still pending",
    "ImageOpener": COUNTS + ": ids of what has proved decodable",
    "PdfPages": COUNTS + ": sizes of pages",
    "Clips": COUNTS + ": sizes and lengths of videos",
    "PrefillPolicy": COUNTS + ": marks of chunks by replica",
    "TokenCache": "tokens of system prompts, none of uploaded content",
}
CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict", "WeakValueDictionary"}


def classes(*folders: str) -> Iterator[ast.ClassDef]:
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            yield from (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {node.name: node for node in of.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def name_of(called: ast.expr) -> str:
    """`CompileQueue[Job]` and `module.CompileQueue` are both CompileQueue."""
    if isinstance(called, ast.Subscript):
        return name_of(called.value)
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Tuple):
        return any(map(is_empty_container, value.elts))
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    return isinstance(value, ast.Call) and not value.args and name_of(value.func) in CONTAINERS


def keeps(of: ast.ClassDef) -> bool:
    """True if instances begin with an empty container as an attribute."""
    made = methods(of).get("__init__")
    assigned = [] if made is None else [node for node in ast.walk(made) if isinstance(node, ast.Assign | ast.AnnAssign)]
    return any(
        is_empty_container(node.value) and "self." in ast.unparse(node).split("=")[0].split(":")[0] for node in assigned
    )


def forgetting() -> dict[str, ast.ClassDef]:
    """Caches, by class name."""
    return {
        found.name: found
        for found in classes(*SERVED)
        if "forget" in methods(found) and found.name not in DEPLOYMENTS | WALKERS and "Protocol" not in bases(found)
    }


def bases(of: ast.ClassDef) -> set[str]:
    return {name_of(base) for base in of.bases}


def unregistered(source: str, caches: set[str]) -> list[str]:
    """Caches that a module builds without handing them to `register`, as class and line."""
    tree, registered = ast.parse(source), set[ast.expr]()
    named: dict[str, list[ast.expr]] = {}  # values of local names
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named.setdefault(node.targets[0].id, []).append(node.value)
        if isinstance(node, ast.Call) and name_of(node.func) == "register":
            registered.update(node.args)
    for argument in list(registered):
        if isinstance(argument, ast.Name):
            registered.update(named.get(argument.id, []))
    return [
        f"{name_of(node.func)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name_of(node.func) in caches and node not in registered
    ]


def test_every_cache_is_registered_where_it_is_built():
    caches = set(forgetting())
    assert {"CompileQueue", "Documents", "IdleWork", "KnownWeights", "Lookups", "PatchAwareOrderer"} <= caches
    found = {
        str(file.relative_to(ROOT)): missed
        for folder in SERVED
        for file in (ROOT / folder).rglob("*.py")
        if (missed := unregistered(file.read_text(), caches))
    }
    assert found == {}


def test_a_cache_that_is_built_without_being_registered_is_found():
    source = "self._known = Known(3)\nother = Known(4)\nthird = group.register(Known[int](5))\ngroup.register(other)\n"
    assert unregistered(source, {"Known"}) == ["Known:1"]


def test_all_caches_are_asked_in_the_same_way():
    for cache in forgetting().values():
        forget = methods(cache)["forget"]
        assert isinstance(forget, ast.FunctionDef), cache.name
        assert [argument.arg for argument in forget.args.args] == ["self", "content", "tenant"], cache.name


def test_what_keeps_anything_forgets_or_says_why_it_need_not():
    keeping = {found.name for found in classes(*CACHING) if keeps(found)}
    known = KEEPS_NOTHING_DELETED.keys() | set(forgetting()) | DEPLOYMENTS
    assert keeping - known == set(), "deletion does not reach these: define `forget` and register them, or say why not"
    assert KEEPS_NOTHING_DELETED.keys() - keeping == set(), "they keep nothing any more"
