# Simulated engines, and agents for them, to try Backhaul without GPUs: `backhaul-simulator`, and `backhaul-node-agent`
# with the NIXL of simulated engines. From the root of a clone:
# docker build -f deploy/docker/simulator.Dockerfile -t backhaul-simulator:0.1.0 .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto proto
COPY services/common services/common
COPY services/node-agent services/node-agent
COPY deploy/simulator deploy/simulator
# In the environment, so that it binds what builds the packages, too.
ENV PIP_CONSTRAINT=/src/constraints.txt
RUN python -m venv /opt/backhaul \
    && /opt/backhaul/bin/pip install --no-cache-dir ./proto ./services/common ./services/node-agent/connector \
        ./services/node-agent ./deploy/simulator

FROM ${PYTHON_IMAGE}
RUN useradd --uid 2000 --user-group --no-create-home --home-dir / backhaul \
    && install -d -o 2000 -g 2000 -m 0700 /run/backhaul
COPY --from=build /opt/backhaul /opt/backhaul
ENV PATH=/opt/backhaul/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    PYTHONPATH=/opt/backhaul/lib/python3.11/site-packages/backhaul_simulator/stand_in/nixl
USER 2000:2000
EXPOSE 8000
ENTRYPOINT ["backhaul-simulator"]
