"""Two folders have one digest when their weights, names and configuration are the same, as far as is sampled."""

import json
import threading
from pathlib import Path

import pytest

from backhaul_connector.weights import WeightsDigests, WeightsUnknownError, digest_folder
from tests.fakes.eventually import eventually

Tensors = dict[str, bytes]

TENSORS = {"a": bytes(5000), "b": b"\1" * 10, "c": b"\2" * 3000, "empty": b""}


def safetensors(tensors: Tensors) -> bytes:
    """Returns a safetensors file: length of the header, header, bytes of the tensors end to end."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + b"".join(tensors.values())


def folder(path: Path, tensors: Tensors = TENSORS, *, name: str = "model.safetensors", config: str = "{}") -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(safetensors(tensors))
    (path / "config.json").write_text(config)
    return path


def test_a_copy_has_the_same_digest(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one"), folder(tmp_path / "other")
    (other / "README.md").write_text("not a part of the model")

    assert digest_folder(one) == digest_folder(other)
    assert len(digest_folder(one)) == 32


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_change_in_a_single_tensor_changes_the_digest(tmp_path: Path, name: str, place: str) -> None:
    changed = bytearray(TENSORS[name])
    changed[{"first": 0, "middle": len(changed) // 2, "last": -1}[place]] ^= 255

    assert digest_folder(folder(tmp_path / "one")) != digest_folder(
        folder(tmp_path / "other", {**TENSORS, name: bytes(changed)})
    )


def test_names_configuration_and_overrides_are_part_of_the_digest(tmp_path: Path) -> None:
    digests = [
        digest_folder(folder(tmp_path / "plain")),
        digest_folder(folder(tmp_path / "plain"), extra="fp8"),
        digest_folder(folder(tmp_path / "config", config='{"rope_theta": 1}')),
        digest_folder(folder(tmp_path / "file", name="other.safetensors")),
        digest_folder(folder(tmp_path / "tensor", {("A" if n == "a" else n): data for n, data in TENSORS.items()})),
        digest_folder(folder(tmp_path / "order", dict(reversed(TENSORS.items())))),
    ]
    (folder(tmp_path / "shards") / "second.safetensors").write_bytes(safetensors({"d": b"1"}))
    (folder(tmp_path / "adapter") / "adapter_config.json").write_text("{}")
    (renamed := folder(tmp_path / "renamed")).joinpath("config.json").rename(renamed / "adapter_config.json")
    digests += [digest_folder(tmp_path / name) for name in ("shards", "adapter", "renamed")]

    assert len(set(digests)) == len(digests)


def test_overrides_do_not_run_into_the_configuration(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", config="b")
    other = folder(tmp_path / "other", config="ab")

    assert digest_folder(one, extra="a") != digest_folder(other, extra="")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "model.pt", "model.pth"])
@pytest.mark.parametrize("size", [1, 100, 300_000])
def test_other_files_are_sampled(tmp_path: Path, name: str, size: int) -> None:
    (tmp_path / name).write_bytes(bytes(size))
    before = digest_folder(tmp_path)
    (tmp_path / name).write_bytes(bytes(size - 1) + b"\1")

    assert digest_folder(tmp_path) != before


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    before = digest_folder(folder(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"another format of the same weights")

    assert digest_folder(tmp_path) == before


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnknownError, match="no weights files"):
        digest_folder(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"short", (0).to_bytes(8, "little"), (1000).to_bytes(8, "little") + b"{}", b"\xff" * 100]
)
def test_a_file_that_is_not_safetensors_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(WeightsUnknownError, match="not a safetensors file"):
        digest_folder(tmp_path)


async def test_a_digest_is_computed_once_and_on_another_thread() -> None:
    threads: list[int] = []
    go, done = threading.Event(), threading.Event()

    def digest(source: str) -> str:
        threads.append(threading.get_ident())
        assert go.wait(5)
        return f"digest of {source}"

    digests = WeightsDigests(digest)

    assert digests.get("m", done=done.set) is None
    assert digests.get("m", done=done.set) is None
    assert digests.problem("m") == ""
    go.set()
    assert done.wait(5)
    assert digests.get("m") == "digest of m"
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_a_digest_that_cannot_be_computed_says_why_and_is_not_tried_again() -> None:
    tried: list[str] = []

    def digest(source: str) -> str:
        tried.append(source)
        raise OSError("disk gone")

    digests = WeightsDigests(digest)
    done = threading.Event()
    digests.get("m", done=done.set)
    assert done.wait(5)

    assert digests.get("m") is None
    assert digests.problem("m") == "OSError: disk gone"
    assert digests.problem("other") == ""
    assert tried == ["m"]


async def test_sources_do_not_wait_for_each_other() -> None:
    go = threading.Event()
    digests = WeightsDigests(lambda source: source if source == "fast" or go.wait(5) else "")
    digests.get("slow")

    await eventually(lambda: digests.get("fast") == "fast")
    assert digests.get("slow") is None
    go.set()
    await eventually(lambda: digests.get("slow") == "slow")
