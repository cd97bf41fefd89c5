"""In-memory index of stored patches by antecedents, asked by placement for every request.

The library finds a patch by its key, a digest: whether one exists for some order of some chunks is a question per
order. The index keeps, per scope, the antecedents themselves as two trees, of sets (sorted) and of sequences, and walks
only the branches that a request's chunks span.

    scope: whose patches, behind which fixed prefix
    sets(scope, [c, a, b]), sequences(scope, [c, a, b]): behind which of these which others are patched

An entry may be stale, its patch evicted: then its chunk is computed, as any other that has no patch, and the
finder discards the entry. A missing entry costs a worse order. So replicas may differ, and nothing here is persisted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.records.keys import DYNAMIC_TENANT, antecedent_key, is_shared

_MAX_BRANCHES = 1024  # of one tree that a look-up visits: bounds the time of an unusual request


@dataclass(frozen=True)
class Scope:
    """Owner of patches and the fixed prefix they stand behind (see `prefix_key`)."""

    owner: str
    prefix: str


def prefix_key(prefix: Sequence[int]) -> str:
    """Name of a fixed prefix, derived from its token ids."""
    return antecedent_key(prefix, (), ordered=True)


def scopes_of(tenant: str, prefix: Sequence[int], contents: Iterable[str]) -> list[Scope]:
    """Scopes of patches that may serve a request: its tenant's, and the dynamic library's.

    The latter only if one of the contents is a reference.
    """
    name = prefix_key(prefix)
    owners = (tenant, DYNAMIC_TENANT) if any(map(is_shared, contents)) else (tenant,)
    return [Scope(owner, name) for owner in owners]


@dataclass(frozen=True)
class Entry:
    """A stored patch, by content ids; `ordered` if it serves its antecedents in this order only."""

    scope: Scope
    content: str
    antecedents: tuple[str, ...]
    ordered: bool

    def __post_init__(self) -> None:
        if not self.ordered:
            object.__setattr__(self, "antecedents", tuple(sorted(self.antecedents)))

    @property
    def names(self) -> set[str]:
        """Content ids of the chunk and its antecedents."""
        return {self.content, *self.antecedents}


@dataclass(slots=True)
class _Branch:
    """Tree node for a list of antecedents: chunks patched behind it, and longer lists."""

    patched: set[str] = field(default_factory=set)
    longer: dict[str, _Branch] = field(default_factory=dict)


class PatchIndex:
    """Bounded LRU index of stored patches. Not thread-safe.

    Holds `limit` entries; those that were added or confirmed longest ago go first.
    """

    def __init__(self, limit: int = 1 << 18) -> None:
        self._limit = limit
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        self._trees: dict[tuple[Scope, bool], _Branch] = {}
        self._naming: dict[str, set[Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def add(self, entry: Entry) -> None:
        """Note that a patch is stored."""
        if entry in self._entries:
            self._entries.move_to_end(entry)
            return
        self._entries[entry] = None
        for content in entry.names:
            self._naming.setdefault(content, set()).add(entry)
        branch = self._trees.setdefault((entry.scope, entry.ordered), _Branch())
        for antecedent in entry.antecedents:
            branch = branch.longer.setdefault(antecedent, _Branch())
        branch.patched.add(entry.content)
        while len(self._entries) > self._limit:
            self.discard(next(iter(self._entries)))

    def discard(self, entry: Entry) -> None:
        """Note that a patch is not stored any more."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        for content in entry.names:
            naming = self._naming[content]
            naming.discard(entry)
            if not naming:
                del self._naming[content]
        tree = entry.scope, entry.ordered
        path = [self._trees[tree]]
        for antecedent in entry.antecedents:
            path.append(path[-1].longer[antecedent])
        path[-1].patched.discard(entry.content)
        for above, antecedent in reversed(list(zip(path, entry.antecedents, strict=False))):
            below = above.longer[antecedent]
            if below.patched or below.longer:
                return
            del above.longer[antecedent]
        if not (path[0].patched or path[0].longer):
            del self._trees[tree]

    def discard_content(self, content: str) -> None:
        """Drop every entry that names a content id."""
        for entry in list(self._naming.get(content, ())):
            self.discard(entry)

    def sets(self, scope: Scope, contents: Sequence[str]) -> dict[int, int]:
        """Patched chunks (a mask) by antecedent set (a mask over `contents`), order irrelevant.

        Of chunks that a request brings twice the first stands for both.
        """
        found: dict[int, int] = {}
        for order, patched in self._walk((scope, False), contents):
            if patched:
                found[_mask(order)] = patched
        return found

    def sequences(self, scope: Scope, contents: Sequence[str]) -> dict[tuple[int, ...], int]:
        """Patched chunks (a mask) by sequence of antecedents (indices into `contents`).

        Every beginning of a sequence is listed.
        """
        return dict(self._walk((scope, True), contents))

    def _walk(self, tree: tuple[Scope, bool], contents: Sequence[str]) -> Iterator[tuple[tuple[int, ...], int]]:
        """The branches of a tree that consist of these contents, shorter ones first."""
        places = {content: i for i, content in reversed(list(enumerate(contents)))}
        level: list[tuple[tuple[int, ...], _Branch]] = [((), self._trees[tree])] if tree in self._trees else []
        left = _MAX_BRANCHES
        while level and left > 0:
            left -= len(level)
            for order, branch in level:
                yield order, _mask(places[content] for content in _common(branch.patched, places))
            longer = (
                ((*order, places[content]), branch.longer[content])
                for order, branch in level
                for content in _common(branch.longer, places)
            )
            level = list(islice(longer, max(left, 0)))


def _common(some: Collection[str], others: Collection[str]) -> list[str]:
    """Intersection of two collections, in time linear in the smaller one."""
    small, large = (some, others) if len(some) < len(others) else (others, some)
    return [content for content in small if content in large]


def _mask(chunks: Iterable[int]) -> int:
    mask = 0
    for chunk in chunks:
        mask |= 1 << chunk
    return mask


class FormedLog:
    """Log of the patches one process has formed or found, for indexes elsewhere that poll it.

    Not thread-safe. Keeps the last `limit`; a reader that polls more seldom than that misses some.
    """

    def __init__(self, limit: int = 1 << 14) -> None:
        self._entries: deque[Entry] = deque(maxlen=limit)
        self._count = 0

    def add(self, entry: Entry) -> None:
        """Append a patch that is stored now."""
        self._entries.append(entry)
        self._count += 1

    def since(self, cursor: int, most: int = 1 << 12) -> tuple[int, list[Entry]]:
        """The oldest entries added since `cursor` (0: ever), `most` at most, and the next cursor."""
        oldest = self._count - len(self._entries)
        start = min(max(cursor, oldest), self._count)
        fresh = list(islice(self._entries, start - oldest, start - oldest + most))
        return start + len(fresh), fresh
