"""Agents of several frameworks, written as in their documentation; scripts/try_ecosystem.sh runs them.

Each agent asks two questions in one conversation, most of them with a tool, and keeps its framework's default settings.
"""

from hotbunk_client import serve

QUESTIONS = ("What is 2+3?", "Are you sure?")


def add(a: int, b: int) -> int:
    """Return the sum of two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def openai_chat(base_url: str, api_key: str, model: str) -> None:
    """Ask by chat completions."""
    from openai import AsyncOpenAI

    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = await AsyncOpenAI(base_url=base_url, api_key=api_key).chat.completions.create(
            model=model, messages=messages
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})


async def openai_responses(base_url: str, api_key: str, model: str) -> None:
    """Ask by Responses, where the server stores the conversation."""
    from openai import AsyncOpenAI, omit

    previous = omit
    for question in QUESTIONS:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as api:
            answer = await api.responses.create(
                model=model, input=question, previous_response_id=previous
            )
        previous = answer.id


async def anthropic_messages(base_url: str, api_key: str, model: str) -> None:
    """Ask by Messages, and send the answer's blocks back unchanged."""
    from anthropic import AsyncAnthropic

    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        async with AsyncAnthropic(base_url=base_url, api_key=api_key) as api:
            answer = await api.messages.create(model=model, messages=messages, max_tokens=1000)
        messages.append(
            {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
        )


async def openai_agents(base_url: str, api_key: str, model: str) -> None:
    """Ask with the defaults of openai-agents: Responses, with strict tool schemas."""
    from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent(name="adder", instructions="Answer.", model=model, tools=[function_tool(add)])
    items = []
    for question in QUESTIONS:
        result = await Runner.run(agent, [*items, {"role": "user", "content": question}])
        items = result.to_input_list()


async def pydantic_ai(base_url: str, api_key: str, model: str) -> None:
    """Ask with pydantic-ai's chat model, which asks again after an empty answer."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel(model, provider=provider), tools=[add])
    history = None
    for question in QUESTIONS:
        history = (await agent.run(question, message_history=history)).all_messages()


async def langgraph(base_url: str, api_key: str, model: str) -> None:
    """Ask with langgraph's prebuilt agent."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model=model, base_url=base_url, api_key=api_key), [add])
    messages = []
    for question in QUESTIONS:
        messages = (await agent.ainvoke({"messages": [*messages, ("user", question)]}))["messages"]


async def litellm(base_url: str, api_key: str, model: str) -> None:
    """Ask with litellm's provider for OpenAI-compatible servers."""
    import litellm as library

    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = await library.acompletion(
            f"openai/{model}", messages, api_base=base_url, api_key=api_key
        )
        messages.append(answer.choices[0].message.model_dump())


def smolagents(base_url: str, api_key: str, model: str) -> None:
    """Ask one question with an agent that writes code, which sends up to three requests."""
    # A ToolCallingAgent forces calls, which is refused
    from smolagents import CodeAgent, OpenAIServerModel, tool

    server = OpenAIServerModel(model_id=model, api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[tool(add)], model=server, max_steps=2, verbosity_level=0)
    agent.run(QUESTIONS[0])


FRAMEWORKS = {
    "openai-chat": openai_chat,
    "openai-Responses": openai_responses,
    "anthropic": anthropic_messages,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "langgraph": langgraph,
    "litellm": litellm,
    "smolagents": smolagents,
}


async def agent(base_url: str, api_key: str, model: str, row: dict[str, str]) -> None:
    """Run one episode with the framework that the row names."""
    result = FRAMEWORKS[row["framework"]](base_url, api_key, model)
    if result is not None:
        await result


if __name__ == "__main__":
    serve(agent)
