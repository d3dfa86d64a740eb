"""Lets pages of docs/ show the plots of benchmarks/results, which lie outside of what mkdocs publishes."""

from pathlib import Path

from mkdocs.structure.files import File

FOLDER = "benchmarks/results"


def on_files(files, config):
    """Publish the plots."""
    root = Path(config.config_file_path).parent
    for path in sorted((root / FOLDER).glob("*.png")):
        files.append(File.generated(config, f"{FOLDER}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, **_):
    """Point at where they are published."""
    return markdown.replace(f"(../{FOLDER}/", f"({FOLDER}/")
