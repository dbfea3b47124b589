//! Halo exchange by MPI: derived datatypes for host memory; for a device, faces are packed there and
//! staged in host memory.

use fabricast::gpu::{CopyMethod, DEFAULT_TIMEOUT, Memory as DeviceMemory, Stream};
use fabricast::ipc::WaitStrategy;
use fabricast::transfer::{Strided, Subarray};
use mpi_examples::memory::{Location, Memory};
use mpi_examples::messages::{Datatype, MessageMemory, Part};
use mpi_examples::{Job, Result};

use crate::exchange::{Exchange, HaloExchange};
use crate::grid::Grid;
use crate::shape::{CELL, DIRECTIONS, Direction, Shape};

/// The exchange by MPI for memory at this place.
pub(crate) fn new(
    job: &Job,
    grid: &Grid,
    shape: Shape,
    at: Location,
) -> Result<Box<dyn HaloExchange>> {
    let neighbours = grid.neighbours();
    Ok(match Memory::new(at, job.group.local().rank, shape.length() as u64 * CELL)? {
        // Memory of its own, as MPI programs have it.
        Memory::Host(_) => Box::new(TypedExchange::new(shape, neighbours, job.wait_strategy())?),
        Memory::Device(field, stream) => {
            let strategy = job.wait_strategy();
            Box::new(StagedExchange::new(shape, neighbours, (field, *stream), strategy)?)
        }
    })
}

/// By derived datatypes.
#[derive(Debug)]
struct TypedExchange {
    shape: Shape,
    strategy: WaitStrategy,
    memory: MessageMemory<f64>,
    neighbours: [u32; DIRECTIONS],
    faces: Vec<Datatype>,
    ghosts: Vec<Datatype>,
}

impl TypedExchange {
    fn new(shape: Shape, neighbours: [u32; DIRECTIONS], strategy: WaitStrategy) -> Result<Self> {
        let part = |direction: Direction, start: [u64; 3]| {
            Datatype::subarray(&shape.extents(), &shape.face(direction), &start)
        };
        let all = Direction::ALL.iter();
        let faces = all.clone().map(|it| part(*it, shape.start(*it))).collect::<Result<_>>()?;
        let ghosts = all.map(|it| part(*it, shape.ghost_start(*it))).collect::<Result<_>>()?;
        let memory = MessageMemory::new(shape.length());
        Ok(Self { shape, strategy, memory, neighbours, faces, ghosts })
    }
}

impl Exchange for TypedExchange {
    fn name(&self) -> String {
        "mpi, derived types".to_owned()
    }

    fn exchange(&mut self, _job: &mut Job) -> Result<()> {
        for direction in Direction::ALL {
            let (index, tag) = (direction.index(), direction.opposite().index() as u32);
            let (rank, datatype) = (self.neighbours[index], &self.ghosts[index]);
            self.memory.receive(Part { at: 0, datatype, rank, tag })?;
        }
        for (index, rank) in self.neighbours.into_iter().enumerate() {
            let datatype = &self.faces[index];
            self.memory.send(Part { at: 0, datatype, rank, tag: index as u32 })?;
        }
        self.memory.wait(self.strategy)
    }
}

impl HaloExchange for TypedExchange {
    fn load(&mut self, cells: &mut [f64]) -> Result<()> {
        cells.copy_from_slice(self.memory.memory());
        Ok(())
    }

    fn store(&mut self, cells: &[f64]) -> Result<()> {
        let memory = self.memory.memory();
        for start in self.shape.rows() {
            let row = start..start + self.shape.cells[2] as usize;
            memory[row.clone()].copy_from_slice(&cells[row]);
        }
        Ok(())
    }
}

/// Staged in host memory: faces are packed on the device.
#[derive(Debug)]
struct StagedExchange {
    shape: Shape,
    strategy: WaitStrategy,
    field: DeviceMemory,
    stream: Stream,
    /// Packed faces to send, and received ones behind them.
    packed: DeviceMemory,
    host: MessageMemory<u8>,
    neighbours: [u32; DIRECTIONS],
    /// Where each packed face begins, and its bytes.
    places: Vec<(u64, Datatype)>,
    pack: Vec<Strided>,
    unpack: Vec<Strided>,
    bytes: Vec<u8>,
}

impl StagedExchange {
    fn new(
        shape: Shape,
        neighbours: [u32; DIRECTIONS],
        (field, stream): (DeviceMemory, Stream),
        strategy: WaitStrategy,
    ) -> Result<Self> {
        let all = shape.bytes_of_faces();
        let packed = stream.device().allocate_shared(2 * all, &[])?;
        let (mut places, mut pack, mut unpack) = (Vec::new(), Vec::new(), Vec::new());
        let mut at = 0;
        for direction in Direction::ALL {
            let size = shape.face(direction);
            let extents = shape.extents();
            let of_array = |origin| Subarray { extents: &extents, origin };
            let of_face = Subarray { extents: &size, origin: &[0; 3] };
            let (start, ghosts) = (shape.start(direction), shape.ghost_start(direction));
            pack.push(Strided::tile(CELL, &size, of_array(&start), of_face)?.shifted(0, at)?);
            let ghosts = Strided::tile(CELL, &size, of_face, of_array(&ghosts))?;
            unpack.push(ghosts.shifted(all + at, 0)?);
            let bytes = size.iter().product::<u64>() * CELL;
            places.push((at, Datatype::bytes(bytes as usize)?));
            at += bytes;
        }
        let host = MessageMemory::new(2 * all as usize);
        let bytes = Vec::new();
        Ok(Self {
            shape,
            strategy,
            field,
            stream,
            packed,
            host,
            neighbours,
            places,
            pack,
            unpack,
            bytes,
        })
    }
}

impl Exchange for StagedExchange {
    fn name(&self) -> String {
        "mpi, staged in host".to_owned()
    }

    fn exchange(&mut self, _job: &mut Job) -> Result<()> {
        let all = self.shape.bytes_of_faces();
        let (field, packed) = (self.field.whole(), self.packed.whole());
        for face in &self.pack {
            self.stream.copy_each(&packed, &field, face.iter(), CopyMethod::Best)?;
        }
        let outgoing = &mut self.host.memory()[..all as usize];
        self.stream.download(&packed.slice(0, all)?, outgoing, DEFAULT_TIMEOUT)?;
        for direction in Direction::ALL {
            let (index, tag) = (direction.index(), direction.opposite().index() as u32);
            let (at, datatype) = &self.places[index];
            let (at, rank) = ((all + at) as usize, self.neighbours[index]);
            self.host.receive(Part { at, datatype, rank, tag })?;
        }
        for (index, rank) in self.neighbours.into_iter().enumerate() {
            let (at, datatype) = &self.places[index];
            self.host.send(Part { at: *at as usize, datatype, rank, tag: index as u32 })?;
        }
        self.host.wait(self.strategy)?;
        let incoming = &self.host.memory()[all as usize..];
        self.stream.upload(&packed.slice(all, all)?, incoming, DEFAULT_TIMEOUT)?;
        for ghosts in &self.unpack {
            self.stream.copy_each(&field, &packed, ghosts.iter(), CopyMethod::Best)?;
        }
        Ok(self.stream.synchronize(DEFAULT_TIMEOUT)?)
    }
}

impl HaloExchange for StagedExchange {
    fn load(&mut self, cells: &mut [f64]) -> Result<()> {
        self.bytes.resize(size_of_val(cells), 0);
        self.stream.download(&self.field.whole(), &mut self.bytes, DEFAULT_TIMEOUT)?;
        for (cell, bytes) in cells.iter_mut().zip(self.bytes.as_chunks().0) {
            *cell = f64::from_ne_bytes(*bytes);
        }
        Ok(())
    }

    fn store(&mut self, cells: &[f64]) -> Result<()> {
        self.bytes.clear();
        self.bytes.extend(cells.iter().flat_map(|cell| cell.to_ne_bytes()));
        Ok(self.stream.upload(&self.field.whole(), &self.bytes, DEFAULT_TIMEOUT)?)
    }
}
