"""`ServerSettings`: what is out of range is one error that names the setting, also on the command line."""

import re

import pytest
from typer.testing import CliRunner

from verax.cli import app
from verax.errors import InvalidParameterError
from verax.serve.http.settings import ServerSettings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"port": 70_000}, "port: expected a whole number of 0 to 65535"),
        ({"log_format": "xml"}, "log_format: expected one of text, json"),
        ({"api_keys": ("",)}, "api_keys: "),
        ({"api_keys": ("schlüssel",)}, "api_keys: "),
        ({"max_body_bytes": 0}, "max_body_bytes: expected a whole number of at least 1"),
        ({"max_queued_videos": 0}, "max_queued_videos: expected a whole number of at least 1"),
        ({"max_videos": -1}, "max_videos: expected a whole number of at least 1"),
        ({"max_video_storage_bytes": 0}, "max_video_storage_bytes: expected a whole number of at least 1"),
        ({"embedding_batch_size": 0}, "embedding_batch_size: expected a whole number of at least 1"),
        ({"max_embedding_inputs": 10, "max_queued_embedding_inputs": 9}, "max_queued_embedding_inputs: .* 10, got 9"),
        ({"video_ttl": 0.0}, "video_ttl: expected a number of more than 0"),
        ({"video_ttl": float("nan")}, "video_ttl: expected a number of more than 0"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout: expected a number of at least 0"),
        ({"slow_client_timeout": 0.0}, "slow_client_timeout: expected a number of more than 0"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, says):
    with pytest.raises(InvalidParameterError, match=f"^{says}"):
        ServerSettings(**settings)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-videos", "0"], "--max-videos"),
        (["--video-ttl", "soon"], "--video-ttl"),
        (["--video-ttl", "inf"], "video_ttl"),
        (["--max-embedding-inputs", "9000"], "max_queued_embedding_inputs"),
    ],
)
def test_a_flag_out_of_range_is_one_error_before_anything_is_loaded(options, named):
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code not in (0, None)
    text = result.output + str(result.exception)
    assert named in re.sub(r"\s+", " ", text)
