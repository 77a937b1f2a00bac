"""Pictures in the playground: one in a message, one that is refused, one that a pipeline draws."""

from typing import Any

import pytest

from inlay import demo as bundled
from tests.live import Fleet, fleet
from tests.serving import free_port, serving
from tests.web.browser import PHONE, WIDE, tab
from tests.web.test_playground import holds, loaded

pytestmark = pytest.mark.slow
ASKED = bundled.vision_examples().examples[0]
PICTURE = bundled.vision_examples().picture(ASKED.pictures[0]).path

DROP = """([name, bytes]) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([new Uint8Array(bytes)], name));
    const at = document.querySelector(".page");
    for (const kind of ["dragover", "drop"]) {
        const event = new DragEvent(kind, {dataTransfer, bubbles: true, cancelable: true});
        at.dispatchEvent(event);
    }
}"""


def test_a_dropped_picture_becomes_a_chip_and_is_asked_about(browser: Any) -> None:
    with fleet(bundled.vision_dir(), dtype="float32") as running:
        url = running.serve(enable_prompt_embeds=True)
        for size, scheme in ((WIDE, "light"), (PHONE, "dark")):
            with tab(browser, url, size, scheme) as opened:
                loaded(opened)
                opened.page.evaluate(DROP, [PICTURE.name, list(PICTURE.read_bytes())])
                opened.page.locator(".composer .chip img").wait_for()
                holds(opened, "⟦1⟧")
                opened.page.fill("#draft", f"⟦1⟧{ASKED.question}")
                opened.page.keyboard.press("Enter")
                opened.page.wait_for_selector(".positions")
                assert ASKED.answer in opened.text(".turn .tokens")
                assert opened.page.locator(".turn .chip img").evaluate("it => it.naturalWidth") > 0
                opened.shot(f"picture-{scheme}")
                assert opened.violations() == []


def test_a_model_of_text_refuses_a_picture_with_a_word(browser: Any, demo: Fleet) -> None:
    with tab(browser, demo.serve(enable_prompt_embeds=True)) as opened:
        loaded(opened)
        opened.page.set_input_files("input[type=file]", str(PICTURE))
        opened.sees("takes no pictures")
        assert opened.page.locator(".chip").count() == 0
        # Nothing was sent, so that the browser has nothing to report.
        assert opened.said == []


def test_a_pipeline_draws_its_answer_in_the_chat(browser: Any) -> None:
    example = bundled.drawn_examples().examples[0]
    graph = bundled.pipeline_dir() / "graph.yaml"
    looking = free_port()
    with serving(graph, "--dtype", "float32", "--admin-port", looking) as served:
        for size, scheme in ((WIDE, "light"), (PHONE, "dark")):
            with tab(browser, served.url, size, scheme) as opened:
                opened.page.get_by_label("Answer with an image too").wait_for(state="attached")
                opened.page.fill("#draft", example.question)
                opened.page.keyboard.press("Enter")
                opened.page.wait_for_selector(".positions")
                drawn = opened.page.get_by_alt_text(f"Image: {example.answer}")
                assert drawn.evaluate("async it => (await it.decode(), it.naturalWidth)") == 16
                opened.shot(f"drawn-{scheme}")
                assert opened.violations() == []
            with tab(browser, f"http://127.0.0.1:{looking}/fleet", size, scheme) as opened:
                for stage in ("writer", "painter"):
                    card = opened.page.locator(".card", has_text=f"inlay-demo/{stage}")
                    card.get_by_text("leases").wait_for()
                opened.shot(f"fleet-stages-{scheme}")
                assert opened.violations() == []
