"""Lines of the page on what a server adds, on abandoned requests and on memory over time."""

from verax.bench.serve import page

SERVER = {"memory": None, "abandoned": None, "most_orphans": None, "looks": 0, "drain_s": None}


def test_the_time_that_the_server_adds_is_a_number():
    added = {"requests": 640, "mean": 3.5, "p10": 1.0, "p50": 3.25, "p90": 6.0, "p99": 9.5, "rounds_p50": [4.0, 2.0]}
    (line,) = page._added(added)
    assert line.startswith(
        "- Time to first token: added by the server: 3.2 ms p50 (2.0 to 4.0 ms by round), 3.5 ms mean"
    )
    assert "640 requests" in line
    assert page._added(None) == []


def test_a_ratio_has_its_spread():
    line = page._ratio("verax serve / llama.cpp server", 1.5, [1.25, 1.75])
    assert line == "- verax serve / llama.cpp server, output tokens per second: 1.50x (P10-P90 of rounds 1.25-1.75)."


def test_aborts_are_shown_with_the_longest_time_and_the_late_ones():
    found = {"clients": 200, "logged": 199, "late": 3, "p50_s": 0.002, "p99_s": 0.5, "most_s": 1.5}
    found |= {"unread": 5, "unread_most_s": 2.0}
    text = "\n".join(page._server({**SERVER, "abandoned": {**found, "engine_aborts": 190, "ran_to_their_end": 7}}))
    assert "200 clients disconnected. The server's log has the end of 199 of their requests; 3 ended later" in text
    assert "(2 ms p50, 500 ms p99, 1500 ms at most)" in text
    assert "5 of them left before the server had read their request." in text
    assert "the last was dropped 2000 ms after the disconnection" in text
    assert "The engine counted 190 aborts. 7 abandoned requests ran to their end." in text
    assert page._server(SERVER) == []


def test_memory_is_a_table_over_time_that_begins_and_ends_with_the_load():
    points = [[float(when), 1 + when / 1000] for when in range(0, 610, 10)]
    memory = {"start_gb": 1.0, "warm_gb": 1.15, "end_gb": 1.6, "peak_gb": 1.6, "over_time": points}
    lines = page._server({**SERVER, "memory": memory})
    assert "(+450 MB since that quarter)" in lines[1]
    assert lines[3].startswith("| time, s | 0 | 50 |")
    assert lines[3].endswith("| 550 | 600 |")
    assert lines[5].endswith("| 1.550 | 1.600 |")
    short = page._server({**SERVER, "memory": {**memory, "over_time": points[:2]}})
    assert short[3] == "| time, s | 0 | 10 |"
