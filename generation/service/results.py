"""What becomes of a service's calls: answers in order, errors that name their prompt, waits that end."""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, as_completed, wait
from typing import TYPE_CHECKING, Any, Self

from .settings import TIMEOUT_VARIABLE

if TYPE_CHECKING:
    from vllm import RequestOutput


class PromptErrors(ExceptionGroup[Exception]):
    """Some prompts of a batch failed, each with its own error.

    Attributes:
        outputs: in the order of the prompts; None for those that failed.
    """

    outputs: "list[RequestOutput | None]"

    def __new__(cls, errors: Sequence[Exception], outputs: "list[RequestOutput | None]") -> Self:
        text = f"{len(errors)} of {len(outputs)} prompts failed; the others' answers are in the error's `outputs`"
        self = super().__new__(cls, text, errors)
        self.outputs = outputs
        return self

    def __repr__(self) -> str:
        return f"PromptErrors({self.message!r}, {list(self.exceptions)!r})"

    def derive(self, excs: Sequence[Exception]) -> "PromptErrors":  # type: ignore[override]
        """The same for some of the errors, as `except*` splits them."""
        return PromptErrors(excs, self.outputs)


def wait_for_answers(futures: Sequence[Future[Any]], progress: bool) -> None:
    """Wait until all have ended, each by its own deadline; with a progress bar if asked for."""
    if not progress:
        wait(futures)
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    for _ in tqdm(as_completed(futures), total=len(futures), desc="Processed prompts"):
        pass


def answer_or_error(future: Future[Any], place: int) -> Any:
    """What a future that has ended gives: its result, or its error with a note that names the prompt."""
    try:
        return future.result()
    except CancelledError:
        error: Exception = RuntimeError("the service was shut down before this prompt was answered")
    except Exception as raised:
        error = raised
    error.add_note(f"prompt {place}")
    return error


def answers(results: list[Any], single: bool, return_exceptions: bool) -> Any:
    """Results of a call in the form that it asked for, or its errors raised."""
    errors = [result for result in results if isinstance(result, Exception)]
    if errors and not return_exceptions:
        if single:
            raise errors[0]
        raise PromptErrors(errors, [None if isinstance(result, Exception) else result for result in results])
    return results[0] if single else results


def results_of(calls: Sequence[Future[Any]], timeout: float, what: str) -> list[Any]:
    """Results of calls to all engines, in order; the first failure is raised at once.

    Raises:
        TimeoutError: naming `what` and the engines that did not answer in time.
    """
    done, missing = wait(calls, timeout, FIRST_EXCEPTION)
    for call in done:
        if (error := call.exception()) is not None:
            raise error
    if missing:
        late = ", ".join(str(i) for i, call in enumerate(calls) if call in missing)
        raise TimeoutError(f"{what}: no answer from engine {late} within {timeout:.0f} s")
    return [call.result() for call in calls]


def wait_until_started(starts: Sequence[Future[Any]], timeout: float) -> None:
    """Wait for all engines; raises the first failure at once, or `TimeoutError` with the remedy."""
    try:
        results_of(starts, timeout, "starting engines")
    except TimeoutError as error:
        error.add_note(f"The environment variable {TIMEOUT_VARIABLE} allows more time.")
        raise
