"""An engine's private folder goes with it, whoever still writes into it."""

import threading
from pathlib import Path

from grpo.engine.lifetime import remove_traces


def test_a_folder_that_is_written_to_meanwhile_is_gone(tmp_path: Path) -> None:
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()

        def write(folder: Path = folder) -> None:
            for number in range(10_000):
                try:
                    (folder / str(number)).touch()
                except FileNotFoundError:
                    return

        writers = [threading.Thread(target=write) for _ in range(3)]
        for writer in writers:
            writer.start()
        remove_traces(folder)
        for writer in writers:
            writer.join()
        assert not folder.exists()
