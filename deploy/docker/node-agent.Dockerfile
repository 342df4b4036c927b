# The node agent. From the root of a clone:
# docker build -f deploy/docker/node-agent.Dockerfile -t backhaul-node-agent:0.1.0 .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto proto
COPY services/common services/common
COPY services/node-agent services/node-agent
# In the environment, so that it binds what builds the packages, too.
ENV PIP_CONSTRAINT=/src/constraints.txt
# NIXL comes without its dependencies: it declares torch and does not use it.
RUN python -m venv /opt/backhaul \
    && /opt/backhaul/bin/pip install --no-cache-dir ./proto ./services/common ./services/node-agent/connector \
        ./services/node-agent \
    && /opt/backhaul/bin/pip install --no-cache-dir --no-deps -r services/node-agent/requirements-nixl.txt

FROM ${PYTHON_IMAGE}
# The number of the user that vLLM's own images bring (docker/Dockerfile): the agent's socket is for its own user only.
RUN useradd --uid 2000 --user-group --no-create-home --home-dir / backhaul \
    && install -d -o 2000 -g 2000 -m 0700 /run/backhaul
COPY --from=build /opt/backhaul /opt/backhaul
ENV PATH=/opt/backhaul/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    BACKHAUL_NODE_AGENT_LISTEN=0.0.0.0:7201
USER 2000:2000
EXPOSE 7201
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
    CMD ["python", "-m", "backhaul_common.call", "127.0.0.1:7201", "grpc.health.v1.Health/Check", "{\"service\": \"liveness\"}", "--timeout-s", "5"]
ENTRYPOINT ["backhaul-node-agent"]
