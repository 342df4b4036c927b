# The registry. From the root of a clone: docker build -f deploy/docker/registry.Dockerfile -t backhaul-registry:0.1.0 .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto proto
COPY services/common services/common
COPY services/registry services/registry
# In the environment, so that it binds what builds the packages, too.
ENV PIP_CONSTRAINT=/src/constraints.txt
RUN python -m venv /opt/backhaul \
    && /opt/backhaul/bin/pip install --no-cache-dir ./proto ./services/common ./services/registry

FROM ${PYTHON_IMAGE}
RUN useradd --uid 2000 --user-group --no-create-home --home-dir / backhaul
COPY --from=build /opt/backhaul /opt/backhaul
ENV PATH=/opt/backhaul/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    BACKHAUL_REGISTRY_LISTEN=0.0.0.0:7100
USER 2000:2000
EXPOSE 7100
# Whether it answers, not whether it has etcd: who restarts it for that only makes it worse.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
    CMD ["python", "-m", "backhaul_common.call", "127.0.0.1:7100", "grpc.health.v1.Health/Check", "{\"service\": \"liveness\"}", "--timeout-s", "5"]
ENTRYPOINT ["backhaul-registry"]
