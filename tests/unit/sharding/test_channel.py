"""Strangers that talk to a rank, and bytes that are not a message, get a sentence; they never become an object."""

import ast
import os
import pickle
from pathlib import Path

import msgspec
import pytest
import zmq

from generation.engine.settings import EngineSettings
from generation.engine.vllm_compat import started_with
from sharding.wire import channel as channels
from sharding.wire.channel import Channel, Listener, SyncError, connect
from sharding.workers import Link
from tests.conftest import ROOT

harm: list[str] = []


def do_harm() -> None:
    harm.append("done")


class Harmful:
    """An object that acts when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return do_harm, ()


GARBAGE = {
    "nothing": b"",
    "noise": b"\xc1\x07hello",
    "cut short": msgspec.msgpack.encode({"kind": "hello", "secret": "s"})[:-2],
    "nested without end": b"\x91" * 100_000,
    "a number": msgspec.msgpack.encode(7),
    "without a kind": msgspec.msgpack.encode({"secret": "s"}),
    "of a strange kind": msgspec.msgpack.encode({"kind": ["hello"]}),
}


def raw_socket(endpoint: str) -> "zmq.Socket[bytes]":
    """Return the socket of a peer that can send any bytes."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    return socket


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SyncError, match=rf"run has mode {mode:o}, open to other users"):
        Listener(folder, "weights-0")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_bytes_that_are_no_message_end_the_connecting_with_a_sentence(
    tmp_path: Path, garbage: bytes
) -> None:
    listener = Listener(tmp_path, "weights-0")
    stray = raw_socket(listener.endpoint)
    stray.send(garbage)
    with pytest.raises(
        SyncError,
        match=r"(not a message|without a kind) arrived instead of a connection from the worker on cpu:0",
    ):
        listener.accept(5, "cpu:0")
    stray.close(linger=0)
    listener.close()


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_worker_with_an_invalid_answer_fails_only_its_rank(tmp_path: Path, garbage: bytes) -> None:
    """The rank records the failure, and continues with the others' collectives."""
    listener = Listener(tmp_path, "weights-0")
    worker = raw_socket(listener.endpoint)
    hello = {"kind": "hello", "secret": listener.secret, "device_id": "cpu:0", "pid": 1}
    worker.send(msgspec.msgpack.encode(hello))
    listener.accept(5, "cpu:0")
    link = Link(listener, 1, 5.0, lambda: None, "cpu:0")
    link.post("begin")
    worker.send(garbage)
    assert link.collect() == {}
    assert isinstance(link.error, SyncError) and "answer from the worker on cpu:0" in str(link.error)
    link.post("bucket")
    assert link.collect() == {} and link.messages == 1
    worker.close(linger=0)
    listener.close()


def test_a_pickle_is_refused_and_not_opened(tmp_path: Path) -> None:
    listener = Listener(tmp_path, "weights-0")
    stray = raw_socket(listener.endpoint)
    stray.send(pickle.dumps(Harmful()))
    with pytest.raises(SyncError, match="not a message"):
        listener.accept(5, "cpu:0")
    assert harm == []
    pickle.loads(pickle.dumps(Harmful()))
    assert harm == ["done"], "it would have been noticed"
    stray.close(linger=0)
    listener.close()


def test_a_message_that_is_too_large_is_refused_by_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 1000)
    listener = Listener(tmp_path, "weights-0")
    worker = connect(listener.endpoint, listener.secret, "cpu:0", pid=1)
    with pytest.raises(SyncError, match="'begin' of 1[0-9]{3} bytes is larger than the 1000 allowed"):
        worker.send("begin", weights="x" * 1000)
    listener.accept(5, "cpu:0")  # what fits does
    worker.close()
    listener.close()
    listener = Listener(tmp_path, "weights-1")
    stray = raw_socket(listener.endpoint)
    stray.send(b"x" * 1001)
    with pytest.raises(TimeoutError, match="no connection from the worker on cpu:0 within 1 s"):
        listener.accept(1, "cpu:0")
    stray.close(linger=0)
    listener.close()


def test_a_stray_beside_the_worker_is_not_heard(tmp_path: Path) -> None:
    listener = Listener(tmp_path, "weights-0")
    worker = connect(listener.endpoint, listener.secret, "cpu:0", pid=1)
    listener.accept(5, "cpu:0")
    stray = Channel(raw_socket(listener.endpoint))
    for channel, text in ((stray, "a lie"), (worker, "the truth")):
        channel.send("done", said=text)
    assert listener.receive(5, "answer")["said"] == "the truth"
    with pytest.raises(TimeoutError):
        listener.receive(0.5, "answer")
    for channel in (stray, worker, listener):
        channel.close()


def test_a_silent_stray_that_connects_first_does_not_block_the_worker(tmp_path: Path) -> None:
    listener = Listener(tmp_path, "weights-0")
    stray = Channel(raw_socket(listener.endpoint))
    with pytest.raises(TimeoutError):
        listener.accept(0.5, "cpu:0")
    worker = connect(listener.endpoint, listener.secret, "cpu:0", pid=1)
    listener.accept(5, "cpu:0")
    stray.send("done", said="a lie")
    worker.send("done", said="the truth")
    assert listener.receive(5, "answer")["said"] == "the truth"
    listener.send("bucket")
    assert worker.receive(5, "message")["kind"] == "bucket"
    with pytest.raises(TimeoutError):
        stray.receive(0.5, "message")
    for channel in (stray, worker, listener):
        channel.close()


def test_sending_to_a_worker_that_has_gone_raises(tmp_path: Path) -> None:
    listener = Listener(tmp_path, "weights-0")
    with pytest.raises(SyncError, match="nobody is connected to send 'begin' to"):
        listener.send("begin")
    worker = connect(listener.endpoint, listener.secret, "cpu:0", pid=1)
    listener.accept(5, "cpu:0")
    worker.close()
    with pytest.raises(TimeoutError):  # time for ZMQ to notice
        listener.receive(0.5, "answer")
    with pytest.raises(SyncError, match="nobody is connected to send 'bucket' to"):
        listener.send("bucket")
    listener.close()


UNPICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing.connection"}
CALLS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}


@pytest.mark.parametrize("path", sorted((ROOT / "sharding").glob("*.py")), ids=lambda path: path.stem)
def test_nothing_on_the_weight_path_can_unpickle(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert UNPICKLING.isdisjoint(alias.name for alias in node.names), path
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in UNPICKLING, path
        elif isinstance(node, ast.Attribute):
            assert node.attr not in CALLS, path
            assert ast.unparse(node) not in ("torch.load", "torch.save"), path


def test_an_engine_takes_no_pickled_arguments_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    monkeypatch.setenv(name, "1")
    with started_with(EngineSettings("model", max_model_len=8)):
        assert os.environ[name] == "0"
    assert os.environ[name] == "1"
