"""What runs a model: one package or module an engine, all behind `inlay.protocol.work.Engine`."""
