"""Opens a page in headless Chromium with a script that reads it, as a person would."""

import json
import os
import re
import shutil
import subprocess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)  # fmt: skip
MISSING = "no Chromium; apt-get install chromium shows what a browser draws"


def opened(text, path, reader, *flags):
    """Return (what the reader saw, console lines) of the page in a browser.

    reader: JavaScript that ends with the value of an object, which JSON can hold.
    """
    script = f"<script>console.log('SEEN ' + JSON.stringify((() => {{ {reader} }})()));</script>"
    path.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={path.parent}/profile", "--virtual-time-budget=1000", *flags,
         "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
        env={**os.environ, "HOME": str(path.parent)},
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    seen = [line for line in console if "SEEN " in line]
    assert seen, done.stderr[-2000:]
    found = re.search(r'SEEN (\{.*\})", source', seen[0]).group(1)
    return json.loads(found.replace('\\"', '"')), [line for line in console if "SEEN " not in line]
