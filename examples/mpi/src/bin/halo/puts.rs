//! Halo exchange by puts: each rank writes its faces into the ghost cells of its neighbours, as they
//! lie in the array, with a notice each.
//!
//! There are two arrays in turn. A rank may be one step ahead of a neighbour: it then writes ghost
//! cells of the array that the neighbour will compute next. Those of the array that the neighbour
//! still reads are safe, since a rank sends the faces of a step after it has received those of the
//! last one, and a neighbour sends them when it has computed.

use std::time::Duration;

use fabricast::gpu::{CopyMethod, DEFAULT_TIMEOUT, Memory as DeviceMemory};
use fabricast::transfer::path::{Path, Policy};
use fabricast::transfer::{Agent, Notice, Region, Rights, Route, Strided, Token};
use mpi_examples::memory::{Location, Memory};
use mpi_examples::{Job, Result};

use crate::exchange::{Exchange, HaloExchange};
use crate::grid::Grid;
use crate::shape::{CELL, DIRECTIONS, Direction, Shape};

/// All faces have arrived.
const ALL: u8 = (1 << DIRECTIONS) - 1;

/// The arrays of a rank, and the routes to those of its neighbours.
#[derive(Debug)]
pub(crate) struct PutExchange {
    shape: Shape,
    memory: Memory,
    /// For cells that are written to a device.
    scratch: Option<DeviceMemory>,
    bytes: Vec<u8>,
    timeout: Duration,
    routes: Vec<Route>,
    /// For both arrays.
    faces: [Vec<Strided>; 2],
    /// The next step; its array is the step modulo 2.
    step: u64,
    /// The faces of the next step, and of the one after it, that have arrived: one bit each.
    arrived: [u8; 2],
    tokens: Vec<Token>,
    /// Last: peers write to it until it is dropped.
    _region: Region,
}

impl PutExchange {
    /// All ranks call it.
    pub(crate) fn new(job: &mut Job, grid: &Grid, shape: Shape, at: Location) -> Result<Self> {
        let timeout = job.timeout();
        let array = shape.length() as u64 * CELL;
        let memory = Memory::new(at, job.group.local().rank, 2 * array)?;
        let scratch = match &memory {
            Memory::Host(_) => None,
            Memory::Device(_, stream) => Some(stream.device().allocate_shared(array, &[])?),
        };
        let region = job.group.agent().register(memory.buffer(), Rights::WRITE)?;
        let descriptors = job.group.all_gather(&region.descriptor().encode()?, timeout)?;
        let mut routes = Vec::new();
        for neighbour in grid.neighbours() {
            // In a dimension with one rank it is its own neighbour.
            let peer = job.peer(neighbour)?;
            let descriptor = &descriptors[neighbour as usize];
            let agent = job.group.agent();
            routes.push(agent.join(peer, &region, descriptor, &Policy::default(), timeout)?);
        }
        let faces = [0, array].map(|at| {
            Direction::ALL
                .iter()
                .map(|it| shape.halo(*it, at))
                .collect::<std::result::Result<_, _>>()
        });
        let [first, second] = faces;
        Ok(Self {
            shape,
            memory,
            scratch,
            bytes: Vec::new(),
            timeout,
            routes,
            faces: [first?, second?],
            step: 0,
            arrived: [0; 2],
            tokens: Vec::with_capacity(DIRECTIONS),
            _region: region,
        })
    }

    /// The path to the neighbours; the worst one if they differ.
    pub(crate) fn path(&self) -> Option<Path> {
        let is_worse = |path: &Path| (!path.is_local(), *path != Path::SameProcess);
        self.routes.iter().map(Route::path).max_by_key(is_worse)
    }

    fn array(&self) -> usize {
        (self.step % 2) as usize
    }

    fn array_bytes(&self) -> u64 {
        self.shape.length() as u64 * CELL
    }

    fn record(&mut self, notice: &Notice) -> Result<()> {
        let (step, direction) = (notice.tag >> 3, notice.tag & 7);
        let bit = 1 << direction;
        let arrived = &mut self.arrived[(step % 2) as usize];
        if !(self.step..self.step + 2).contains(&step) || bit > ALL || *arrived & bit != 0 {
            return Err(format!("unexpected notice of step {step}, face {direction}").into());
        }
        *arrived |= bit;
        Ok(())
    }

    fn put_faces(&mut self, agent: &mut Agent) -> Result<()> {
        let faces = &self.faces[self.array()];
        for (direction, (route, face)) in self.routes.iter().zip(faces).enumerate() {
            let notice = Notice::new(self.step << 3 | direction as u64, &[])?;
            self.tokens.push(agent.put(route, face, Some(notice))?);
        }
        Ok(())
    }
}

impl HaloExchange for PutExchange {
    fn load(&mut self, cells: &mut [f64]) -> Result<()> {
        let last = (self.step + 1) % 2;
        self.bytes.resize(size_of_val(cells), 0);
        self.memory.read(last * self.array_bytes(), &mut self.bytes)?;
        for (cell, bytes) in cells.iter_mut().zip(self.bytes.as_chunks().0) {
            *cell = f64::from_ne_bytes(*bytes);
        }
        Ok(())
    }

    fn store(&mut self, cells: &[f64]) -> Result<()> {
        self.bytes.clear();
        let row = self.shape.cells[2];
        let array = self.array() as u64 * self.array_bytes();
        match (&self.memory, &self.scratch) {
            (Memory::Device(memory, stream), Some(scratch)) => {
                self.bytes.extend(cells.iter().flat_map(|cell| cell.to_ne_bytes()));
                stream.upload(&scratch.whole(), &self.bytes, DEFAULT_TIMEOUT)?;
                // Not all of it: neighbours may have written ghost cells.
                let [z, y, x] = self.shape.extents();
                let [count_z, count_y, _] = self.shape.cells;
                let first = self.shape.index([1, 1, 1]) as u64 * CELL;
                let rows = Strided::rows(count_y, row * CELL, x * CELL, x * CELL)?
                    .repeat(count_z, y * x * CELL, y * x * CELL)?
                    .shifted(first, first)?;
                let to = memory.slice(array, z * y * x * CELL)?;
                stream.copy_each(&to, &scratch.whole(), rows.iter(), CopyMethod::Best)?;
                stream.synchronize(DEFAULT_TIMEOUT)?;
            }
            _ => {
                for start in self.shape.rows() {
                    self.bytes.clear();
                    let cells = &cells[start..start + row as usize];
                    self.bytes.extend(cells.iter().flat_map(|cell| cell.to_ne_bytes()));
                    self.memory.write(array + start as u64 * CELL, &self.bytes)?;
                }
            }
        }
        Ok(())
    }
}

impl Exchange for PutExchange {
    fn name(&self) -> String {
        "fabricast".to_owned()
    }

    fn exchange(&mut self, job: &mut Job) -> Result<()> {
        self.put_faces(job.group.agent())?;
        let array = self.array();
        while self.arrived[array] != ALL {
            let notice = job.next_notice(self.timeout)?;
            self.record(&notice)?;
        }
        // Its faces were read: their array can be written.
        let agent = job.group.agent();
        for token in self.tokens.drain(..) {
            agent.wait(token, self.timeout)?;
        }
        self.arrived[array] = 0;
        self.step += 1;
        Ok(())
    }
}
