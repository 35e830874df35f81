"""`hotbunk serve`: serve a model to OpenAI clients."""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from generation.engine.engine import Leader
from generation.engine.settings import EngineSettings
from generation.images import ImageLimits, ImageProcessor, ImageRules
from generation.loopback import is_loopback
from generation.server import OpenAIServer, ServerSettings
from trainer.chat_template import end_tokens
from trainer.commands.generate import add_model_arguments, engine_settings, training_sampling
from trainer.config.model_file import is_multimodal, model_config
from trainer.config.schema import ModelConfig
from trainer.data import load_tokenizer
from trainer.engines import on_checkpoint
from trainer.errors import UserError
from trainer.run import processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOK_SECONDS = 0.5  # interval at which the engine's health is checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0: a free one (default: 8000)"
    )
    key = "key that clients must send (default: $HOTBUNK_API_KEY)"
    parser.add_argument("--api-key", default=os.environ.get("HOTBUNK_API_KEY"), help=key)
    parser.add_argument(
        "--name", help="name of the model for clients (default: its folder's name, or its hub name)"
    )
    parser.add_argument("--concurrent", type=int, default=8, help="most answers at a time (default: 8)")
    parser.add_argument(
        "--tool-parser", default="hermes", help="vLLM's parser of tool calls (default: hermes)"
    )
    parser.add_argument("--reasoning-parser", help="vLLM's parser of reasoning")
    parser.add_argument(
        "--images", type=int, default=8, help="most images in a request to a VLM (default: 8)"
    )
    parser.add_argument(
        "--fetch-images", action="store_true", help="fetch images at public addresses, too"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises UserError before anything is started; after that it ends the process
    itself.
    """
    if arguments.concurrent < 1 or not 0 <= arguments.port < 65536:
        raise UserError("--concurrent must be at least 1, and --port from 0 to 65535")
    if arguments.images < 1:
        raise UserError("--images must be at least 1")
    if not arguments.api_key and not is_loopback(arguments.host):
        where = f"--host {arguments.host[:80]} lets other machines connect"
        raise UserError(f"{where}: give an --api-key, set HOTBUNK_API_KEY, or listen on 127.0.0.1")
    settings = engine_settings(arguments.model, arguments.step)
    folder = Path(arguments.model)
    tokenizer = load_tokenizer(ModelConfig(path=settings.model))
    chosen = training_sampling(Path(settings.model)).get("stop_token_ids")
    ends = end_tokens(settings.model, tokenizer, stop_token_ids=chosen)
    for line in ends.remarks:
        print(line, file=sys.stderr)
    usual_name = folder.resolve().name if folder.is_dir() else arguments.model
    server = ServerSettings(
        model_name=arguments.name or usual_name,
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key or None,
        eos_token_ids=tuple(ends.ids),
        tool_parser=arguments.tool_parser,
        reasoning_parser=arguments.reasoning_parser,
        image_rules=_image_rules(settings.model, tokenizer, arguments),
    )
    cache = settings.kv_cache_bytes and settings.kv_cache_bytes * arguments.concurrent
    # For /metrics
    extra = settings.extra | {"disable_log_stats": False, "served_model_name": server.model_name}
    images = server.image_rules.most if server.image_rules is not None else 0
    several = replace(
        settings, max_num_seqs=arguments.concurrent, kv_cache_bytes=cache, images=images, extra=extra
    )
    processes.start_guardian()
    processes.run(lambda: serve(several, server))


def _image_rules(
    model: str, tokenizer: "PreTrainedTokenizerBase", arguments: argparse.Namespace
) -> ImageRules | None:
    model_config(model)  # fetches the file if the model is on the hub
    if not is_multimodal(model):
        return None
    try:
        processor = ImageProcessor(model, tokenizer)
    except Exception as error:  # Transformers reads the user's files without checks
        raise UserError(
            f"{model} has no processor for images: {' '.join(str(error).split())[:300]}"
        ) from error
    return ImageRules(
        processor, ImageLimits(larger="resize"), arguments.images, fetch=arguments.fetch_images
    )


def serve(settings: EngineSettings, server_settings: ServerSettings) -> int:
    """Answer requests until a signal arrives or the engine dies."""

    def job(leader: Leader) -> int:
        server = leader.thread.run(
            OpenAIServer.start(leader.engine, server_settings), 120, "starting the server"
        )
        print(f"{server_settings.model_name} answers at {server.base_url}", flush=True)
        while not leader.engine.llm.errored:
            time.sleep(_LOOK_SECONDS)
        print("hotbunk: the engine has died", file=sys.stderr)
        return 1

    return on_checkpoint("serve", settings, job)
