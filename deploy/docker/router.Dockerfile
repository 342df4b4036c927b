# The router. From the root of a clone: docker build -f deploy/docker/router.Dockerfile -t backhaul-router:0.1.0 .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto proto
COPY services/common services/common
COPY services/node-agent/connector services/node-agent/connector
COPY services/router services/router
# In the environment, so that it binds what builds the packages, too.
ENV PIP_CONSTRAINT=/src/constraints.txt
RUN python -m venv /opt/backhaul \
    && /opt/backhaul/bin/pip install --no-cache-dir ./proto ./services/common ./services/node-agent/connector \
        ./services/router

FROM ${PYTHON_IMAGE}
RUN useradd --uid 2000 --user-group --no-create-home --home-dir / backhaul
COPY --from=build /opt/backhaul /opt/backhaul
ENV PATH=/opt/backhaul/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    BACKHAUL_ROUTER_LISTEN_HTTP=0.0.0.0:8080 BACKHAUL_ROUTER_LISTEN_GRPC=0.0.0.0:8081
USER 2000:2000
EXPOSE 8080 8081
# Whether it answers, not whether it has nodes: who restarts it for that only makes it worse.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
    CMD ["python", "-m", "backhaul_common.call", "127.0.0.1:8081", "grpc.health.v1.Health/Check", "{\"service\": \"liveness\"}", "--timeout-s", "5"]
ENTRYPOINT ["backhaul-router"]
