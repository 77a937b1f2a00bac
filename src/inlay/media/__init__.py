"""Images, audio and video as positions of a prompt: sizes, layouts and fetching, without decoding.

    spec        `MediaSpec`, the facts about a model's media that its card carries; `layout`
    families    `spec_of(directory)`: a model's `MediaSpec` from its configuration files
    items       `image_item`, `audio_item`: a file to the segments of a prompt
    image       formats and sizes of image files; audio: the same of audio
    geometry    rows and marker tokens of an image, one type for each layout; tiles: more of them
    video       rows, markers and times of sampled frames; sampling: which are seen
    frames      ready-made frames, animations; containers: MP4 and WebM
    positions   three-dimensional positions of a prompt with media (M-RoPE)
    embeds      ready-made embeddings of media, checked
    fetch       media by URL; data_url, addresses

A frontend sizes an item from its header and integers alone. Only an encoder decodes it. Nothing
here needs torch.
"""
