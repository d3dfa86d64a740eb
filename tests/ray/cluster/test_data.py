"""Ray Data over two actors: every row once, whatever dies."""

import threading
import time
from collections import Counter

import pytest

from tests.ray.cluster.conftest import ENGINE

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def generate(cluster, tmp_path):
    """Answers the prompts with these numbers into a folder, with checkpoints, and gives the folder's rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray.data
    from ray.data.checkpoint import CheckpointConfig

    from verax.ray import Generate, actor_pool

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    prompts, folder = tmp_path / "prompts", tmp_path / "answers"
    prompts.mkdir()

    def run(numbers, bad=()):
        context.checkpoint_config = CheckpointConfig("custom_id", str(tmp_path / "checkpoints"))
        context.checkpoint_config.delete_checkpoint_on_success = False
        # Ray Data leaves out what is done where it reads files.
        for first in range(0, len(numbers), 10):
            rows = [
                {"custom_id": f"row-{i}", "prompt": "word " * 400 if i in bad else f"The number {i}"}
                for i in numbers[first : first + 10]
            ]
            pq.write_table(pa.Table.from_pylist(rows), prompts / f"{first:04}.parquet")
        pool = actor_pool(2, num_cpus=0.5, batch_size=4, sampling_params=GREEDY, **ENGINE)
        try:
            read = ray.data.read_parquet(str(prompts), override_num_blocks=20)
            read.map_batches(Generate, **pool).write_parquet(str(folder))
        finally:
            context.checkpoint_config = None
        return ray.data.read_parquet(str(folder)).take_all()

    run.folder = folder
    yield run
    context.checkpoint_config = None


def kill_one(actors, folder, killed):
    """Kill -9 of an actor, once some rows are written."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not killed:
        workers = actors("MapBatches(Generate)")
        if len(workers) == 2 and any(folder.rglob("*.parquet")):
            workers[0].kill()
            killed.append(workers[0].pid)
        time.sleep(0.05)


def test_every_row_is_written_once_though_an_actor_is_killed_and_a_row_is_bad(generate, actors):
    killed = []
    killer = threading.Thread(target=kill_one, args=(actors, generate.folder, killed))
    killer.start()
    rows = generate(range(200), bad={17})
    killer.join()
    assert killed, "the rows were done before an actor could be killed"
    assert Counter(row["custom_id"] for row in rows) == {f"row-{i}": 1 for i in range(200)}
    errors = {row["custom_id"]: row["error"] for row in rows if row["error"]}
    assert list(errors) == ["row-17"]
    assert "max_model_len" in errors["row-17"]
    assert all(row["num_output_tokens"] == 8 for row in rows if not row["error"])

    # The same job with more rows does only these.
    before = set(generate.folder.rglob("*.parquet"))
    more = generate(range(210))
    assert before < set(generate.folder.rglob("*.parquet"))
    assert Counter(row["custom_id"] for row in more) == {f"row-{i}": 1 for i in range(210)}
    assert {row["custom_id"]: row["text"] for row in rows}.items() <= {
        row["custom_id"]: row["text"] for row in more
    }.items()


def test_a_pool_that_takes_every_cpu_is_refused(cluster):
    import ray.data
    from ray.data.checkpoint import CheckpointConfig

    from verax.errors import InvalidParameterError
    from verax.ray import actor_pool

    with pytest.raises(InvalidParameterError, match=r"^size: 3 with .* 3 of 3, but 1 must be left.*num_cpus=0.66"):
        actor_pool(3)
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig("custom_id", "/tmp/never-written")
    try:
        with pytest.raises(InvalidParameterError, match=r"^size: 2 .*but 2 must be left.*num_cpus=0.5"):
            actor_pool(2)
    finally:
        context.checkpoint_config = None
