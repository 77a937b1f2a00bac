from tests.live import llama as llama
from tests.live import url as url
from tests.web.browser import browser as browser
from tests.web.servers import demo as demo
