"""Hook of mkdocs: adds `notebooks/` to the pages of the site, because mkdocs reads only the files under `docs/`."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files


@event_priority(100)  # before mkdocs-jupyter, which renders the notebooks that it finds
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each notebook as `notebooks/NAME.ipynb`."""
    root = Path(config.config_file_path).parent
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{path.name}"
        files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    return files
