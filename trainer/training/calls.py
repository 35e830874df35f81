"""Agreement of ranks on the calls that they make: all make the same ones, with the same data."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from sharding.ranks import EVERYBODY, RemoteError, dead_ranks, exchange, rank, world_size
from trainer.errors import UserError


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Append the sentence of a UserError in the block to the problems, of which all ranks are to
    learn together.
    """
    try:
        yield
    except UserError as error:
        problems.append(str(error))


class Calls:
    """The calls that this rank has made so far, each of which all ranks make together."""

    def __init__(self, seconds: float) -> None:
        """Start at none; `seconds` is the deadline of the process group, for the errors."""
        self.number = 0
        self._seconds = seconds

    def begin(self, name: str, content: Iterable[bytes] = (), problems: Sequence[str] = ()) -> None:
        """Count a call, and `agree` on it. Collective."""
        self.number += 1
        self.agree(name, content, problems)

    def agree(self, name: str, content: Iterable[bytes] = (), problems: Sequence[str] = ()) -> None:
        """Compare the name and the content of a call, or of a part of one, with those of the other
        ranks. Collective.

        `problems` are sentences about this rank's arguments. Raises UserError on all ranks if they
        differ or one has a problem, and RemoteError if a rank does not come.
        """
        digest = hashlib.blake2b(digest_size=16)
        for part in content if world_size() > 1 else ():
            digest.update(len(part).to_bytes(8, "little") + part)
        where = f"call {self.number}, {name}"
        try:
            ranks = exchange([name, digest.hexdigest(), "".join(problems[:1])])
        except RuntimeError as error:
            culprit = dead_ranks() or f"another rank, which did not come within {self._seconds:g} s"
            message = f"rank {rank(EVERYBODY)} lost contact with {culprit} in {where}"
            raise RemoteError(f"{message}: every rank makes the same calls ({error})") from error
        self._compare(where, ranks)

    def _compare(self, where: str, ranks: list[list[str]]) -> None:
        names = [name for name, *_ in ranks]
        if len(set(names)) > 1:
            different = ", ".join(f"rank {number} {name}" for number, name in enumerate(names))
            raise UserError(f"ranks differ in call {self.number}: {different}; make the same calls")
        if problems := [problem for *_, problem in ranks if problem]:
            raise UserError(problems[0])
        digests = [digest for _, digest, _ in ranks]
        if len(set(digests)) > 1:
            other = next(number for number, digest in enumerate(digests) if digest != digests[0])
            remedy = "every rank gives all of the data, and each computes its share"
            raise UserError(f"ranks 0 and {other} have different data in {where}: {remedy}")
