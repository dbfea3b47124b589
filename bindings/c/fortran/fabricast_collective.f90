! fabricast_collective - collective operations among the ranks of a job for Fortran 2018, by the
! functions of fabricast.h, which documents them. Names and results are those of C, with the
! differences that the module fabricast lists, and these:
!
! - Arrays are of any rank, of real(real32), real(real64), integer(int32) or integer(int64): the
!   compiler chooses the function. They are contiguous, or copied by the compiler.
! - Numbers of elements are those of the arrays, and numbers of ranks count from 0.
! - Reductions and broadcasts are in place. An array with a block for each rank has as many elements
!   as the ranks together; that of a rank that does not use it may have any size.
! - counts has the number of elements of each rank, if they differ.
!
!     use fabricast
!     use fabricast_collective
!     type(fabricast_domain) :: domain
!     if (fabricast_domain_join_launched(domain) /= FABRICAST_OK) error stop fabricast_message()
!     status = fabricast_domain_all_reduce(domain, sums, FABRICAST_REDUCE_SUM, timeout)
module fabricast_collective
    use, intrinsic :: iso_c_binding
    use fabricast
    implicit none
    private

    ! --------------------------------------------------------------------------- constants

    integer(c_int32_t), parameter :: FABRICAST_TYPE_I32 = 6
    integer(c_int32_t), parameter :: FABRICAST_TYPE_I64 = 8
    integer(c_int32_t), parameter :: FABRICAST_TYPE_F32 = 11
    integer(c_int32_t), parameter :: FABRICAST_TYPE_F64 = 12

    integer(c_int32_t), parameter, public :: FABRICAST_REDUCE_SUM = 1
    integer(c_int32_t), parameter, public :: FABRICAST_REDUCE_PRODUCT = 2
    integer(c_int32_t), parameter, public :: FABRICAST_REDUCE_MIN = 3
    integer(c_int32_t), parameter, public :: FABRICAST_REDUCE_MAX = 4
    integer(c_int32_t), parameter, public :: FABRICAST_REDUCE_MEAN = 5

    integer(c_int32_t), parameter, public :: FABRICAST_ALGORITHM_AUTOMATIC = 0
    integer(c_int32_t), parameter, public :: FABRICAST_ALGORITHM_ONE_STEP = 1
    integer(c_int32_t), parameter, public :: FABRICAST_ALGORITHM_TWO_STEP = 2
    integer(c_int32_t), parameter, public :: FABRICAST_ALGORITHM_DIRECT = 3
    integer(c_int32_t), parameter, public :: FABRICAST_ALGORITHM_LIBRARY = 4

    ! ------------------------------------------------------------------ types, structures

    type, bind(c), public :: fabricast_domain
        type(c_ptr) :: handle = c_null_ptr
    end type

    type, bind(c) :: parameters
        integer(c_int32_t) :: alpha, chunk_bits, stripes, algorithm
    end type

    type, bind(c) :: domain_options
        integer(c_size_t) :: size
        type(c_ptr) :: directory, job, ranks
        integer(c_size_t) :: rank_count
        type(c_ptr) :: candidates
        integer(c_size_t) :: candidate_count
        integer(c_int64_t) :: topology_hash, timeout, round_timeout
        integer(c_int32_t) :: waiting, window, aggregation, percentile
        integer(c_int32_t) :: aggregation_point, first_alpha, reads_peers, is_fixed
        type(parameters) :: parameters
    end type

    ! --------------------------------------------------------------------------- functions

    public :: fabricast_domain_join, fabricast_domain_join_launched, fabricast_domain_close
    public :: fabricast_domain_rank, fabricast_domain_size, fabricast_error_ranks
    public :: fabricast_domain_barrier

    ! Reduces the elements of all ranks to those of each.
    interface fabricast_domain_all_reduce
        module procedure all_reduce_real32, all_reduce_real64, all_reduce_int32, all_reduce_int64
    end interface
    public :: fabricast_domain_all_reduce

    ! Reduces the elements of all ranks to those of the root. Those of the others stay.
    interface fabricast_domain_reduce
        module procedure reduce_real32, reduce_real64, reduce_int32, reduce_int64
    end interface
    public :: fabricast_domain_reduce

    ! Copies the elements of the root to all ranks.
    interface fabricast_domain_broadcast
        module procedure broadcast_real32, broadcast_real64, broadcast_int32, broadcast_int64
    end interface
    public :: fabricast_domain_broadcast

    ! Copies the elements of each rank to all, in the order of the ranks.
    interface fabricast_domain_all_gather
        module procedure all_gather_real32, all_gather_real64, all_gather_int32, all_gather_int64
    end interface
    public :: fabricast_domain_all_gather

    ! Reduces a block for each rank: rank n gets that of the nth blocks.
    interface fabricast_domain_reduce_scatter
        module procedure reduce_scatter_real32, reduce_scatter_real64
        module procedure reduce_scatter_int32, reduce_scatter_int64
    end interface
    public :: fabricast_domain_reduce_scatter

    ! Copies the nth block of each rank to rank n.
    interface fabricast_domain_all_to_all
        module procedure all_to_all_real32, all_to_all_real64, all_to_all_int32, all_to_all_int64
    end interface
    public :: fabricast_domain_all_to_all

    ! Copies the elements of each rank to the root. Others do not use all.
    interface fabricast_domain_gather
        module procedure gather_real32, gather_real64, gather_int32, gather_int64
    end interface
    public :: fabricast_domain_gather

    ! Copies a block of the root to each rank. Others do not use blocks.
    interface fabricast_domain_scatter
        module procedure scatter_real32, scatter_real64, scatter_int32, scatter_int64
    end interface
    public :: fabricast_domain_scatter

    interface
        function c_options_init(options, size) result(status) &
            bind(c, name='fabricast_domain_options_init')
            import :: c_int32_t, c_size_t, domain_options
            type(domain_options), intent(out) :: options
            integer(c_size_t), value :: size
            integer(c_int32_t) :: status
        end function

        function c_join(world_size, rank, options, domain) result(status) &
            bind(c, name='fabricast_domain_join')
            import :: c_int32_t, domain_options, fabricast_domain
            integer(c_int32_t), value :: world_size, rank
            type(domain_options), intent(in) :: options
            type(fabricast_domain), intent(out) :: domain
            integer(c_int32_t) :: status
        end function

        function c_join_launched(options, domain) result(status) &
            bind(c, name='fabricast_domain_join_launched')
            import :: c_int32_t, domain_options, fabricast_domain
            type(domain_options), intent(in) :: options
            type(fabricast_domain), intent(out) :: domain
            integer(c_int32_t) :: status
        end function

        function fabricast_domain_close(domain, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_domain
            type(fabricast_domain), value :: domain
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function fabricast_domain_rank(domain, rank) result(status) bind(c)
            import :: c_int32_t, fabricast_domain
            type(fabricast_domain), value :: domain
            integer(c_int32_t), intent(out) :: rank
            integer(c_int32_t) :: status
        end function

        function fabricast_domain_size(domain, size) result(status) bind(c)
            import :: c_int32_t, fabricast_domain
            type(fabricast_domain), value :: domain
            integer(c_int32_t), intent(out) :: size
            integer(c_int32_t) :: status
        end function

        function fabricast_domain_barrier(domain, timeout) result(status) bind(c)
            import :: c_int32_t, c_int64_t, fabricast_domain
            type(fabricast_domain), value :: domain
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_error_ranks(ranks, capacity) result(count) bind(c, name='fabricast_error_ranks')
            import :: c_int32_t, c_size_t
            integer(c_int32_t), intent(inout) :: ranks(*)
            integer(c_size_t), value :: capacity
            integer(c_size_t) :: count
        end function

        function c_all_reduce(domain, input, output, count, type, op, timeout) &
                result(status) &
            bind(c, name='fabricast_domain_all_reduce')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, output
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type, op
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_reduce(domain, input, output, count, type, op, root, timeout) &
                result(status) &
            bind(c, name='fabricast_domain_reduce')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, output
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type, op, root
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_broadcast(domain, buffer, count, type, root, timeout) result(status) &
            bind(c, name='fabricast_domain_broadcast')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: buffer
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type, root
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_all_gather(domain, input, output, count, type, timeout) &
                result(status) &
            bind(c, name='fabricast_domain_all_gather')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, output
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_all_gather_unequal(domain, input, count, output, counts, offsets, &
                type, timeout) result(status) &
            bind(c, name='fabricast_domain_all_gather_unequal')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input
            integer(c_size_t), value :: count
            type(c_ptr), value :: output, counts, offsets
            integer(c_int32_t), value :: type
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_reduce_scatter(domain, input, output, count, type, op, timeout) &
                result(status) &
            bind(c, name='fabricast_domain_reduce_scatter')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, output
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type, op
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_reduce_scatter_unequal(domain, input, output, counts, offsets, type, &
                op, timeout) result(status) &
            bind(c, name='fabricast_domain_reduce_scatter_unequal')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, output, counts, offsets
            integer(c_int32_t), value :: type, op
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_all_to_all(domain, input, output, count, type, timeout) &
                result(status) &
            bind(c, name='fabricast_domain_all_to_all')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, output
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_all_to_all_unequal(domain, input, send_counts, send_offsets, output, &
                receive_counts, receive_offsets, type, timeout) result(status) &
            bind(c, name='fabricast_domain_all_to_all_unequal')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, send_counts, send_offsets
            type(c_ptr), value :: output, receive_counts, receive_offsets
            integer(c_int32_t), value :: type
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_gather(domain, input, output, count, type, root, timeout) &
                result(status) &
            bind(c, name='fabricast_domain_gather')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, output
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type, root
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_gather_unequal(domain, input, count, output, counts, offsets, type, &
                root, timeout) result(status) &
            bind(c, name='fabricast_domain_gather_unequal')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input
            integer(c_size_t), value :: count
            type(c_ptr), value :: output, counts, offsets
            integer(c_int32_t), value :: type, root
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_scatter(domain, input, output, count, type, root, timeout) &
                result(status) &
            bind(c, name='fabricast_domain_scatter')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, output
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type, root
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function

        function c_scatter_unequal(domain, input, counts, offsets, output, count, type, &
                root, timeout) result(status) &
            bind(c, name='fabricast_domain_scatter_unequal')
            import :: c_int32_t, c_int64_t, c_ptr, c_size_t, fabricast_domain
            type(fabricast_domain), value :: domain
            type(c_ptr), value :: input, counts, offsets, output
            integer(c_size_t), value :: count
            integer(c_int32_t), value :: type, root
            integer(c_int64_t), value :: timeout
            integer(c_int32_t) :: status
        end function
    end interface

contains

    ! A Fortran string as a text of C.
    subroutine set_text(component, text, string)
        type(c_ptr), intent(inout) :: component
        character(kind=c_char, len=:), allocatable, target, intent(inout) :: text
        character(*), intent(in), optional :: string
        if (.not. present(string)) return
        text = trim(string)//c_null_char
        component = c_loc(text)
    end subroutine

    ! The ranks that caused the thread's last error; of size 0 if they are not known.
    function fabricast_error_ranks() result(ranks)
        integer(c_int32_t), allocatable :: ranks(:)
        integer(c_int32_t) :: none(1)
        integer(c_size_t) :: count

        allocate (ranks(c_error_ranks(none, 0_c_size_t)))
        count = c_error_ranks(ranks, size(ranks, kind=c_size_t))
    end function

    ! timeout is in nanoseconds. All operations use the algorithm, instead of learning which is best.
    function fabricast_domain_join(world_size, rank, domain, directory, job, ranks, topology_hash, &
                                   timeout, waiting, algorithm) result(status)
        integer(c_int32_t), intent(in) :: world_size, rank
        type(fabricast_domain), intent(out) :: domain
        character(*), intent(in), optional :: directory, job
        integer(c_int32_t), intent(in), contiguous, target, optional :: ranks(:)
        integer(c_int64_t), intent(in), optional :: topology_hash, timeout
        integer(c_int32_t), intent(in), optional :: waiting, algorithm
        integer(c_int32_t) :: status
        type(domain_options) :: options
        character(kind=c_char, len=:), allocatable, target :: a, b

        status = c_options_init(options, c_sizeof(options))
        if (status /= FABRICAST_OK) return
        call set_text(options%directory, a, directory)
        call set_text(options%job, b, job)
        if (present(ranks)) then
            options%ranks = c_loc(ranks)
            options%rank_count = size(ranks, kind=c_size_t)
        end if
        if (present(topology_hash)) options%topology_hash = topology_hash
        if (present(timeout)) options%timeout = timeout
        if (present(waiting)) options%waiting = waiting
        if (present(algorithm)) then
            options%is_fixed = 1
            options%parameters%algorithm = algorithm
        end if
        status = c_join(world_size, rank, options, domain)
    end function

    ! timeout is in nanoseconds.
    function fabricast_domain_join_launched(domain, directory, timeout, waiting) result(status)
        type(fabricast_domain), intent(out) :: domain
        character(*), intent(in), optional :: directory
        integer(c_int64_t), intent(in), optional :: timeout
        integer(c_int32_t), intent(in), optional :: waiting
        integer(c_int32_t) :: status
        type(domain_options) :: options
        character(kind=c_char, len=:), allocatable, target :: a

        status = c_options_init(options, c_sizeof(options))
        if (status /= FABRICAST_OK) return
        call set_text(options%directory, a, directory)
        if (present(timeout)) options%timeout = timeout
        if (present(waiting)) options%waiting = waiting
        status = c_join_launched(options, domain)
    end function

    ! Number of ranks; 1 if the domain is not open, which is an error of the function that follows.
    function ranks_of(domain) result(count)
        type(fabricast_domain), intent(in) :: domain
        integer(c_size_t) :: count
        integer(c_int32_t) :: found

        count = 1
        if (fabricast_domain_size(domain, found) == FABRICAST_OK) count = max(1, found)
    end function

    ! The address, if the sizes are as they should be; otherwise NULL, which is an error of the
    ! function that follows.
    function if_fits(address, fits) result(checked)
        type(c_ptr), intent(in) :: address
        logical, intent(in) :: fits
        type(c_ptr) :: checked
        checked = c_null_ptr
        if (fits) checked = address
    end function

    function does_fit(domain, counts, total) result(fits)
        type(fabricast_domain), intent(in) :: domain
        integer(c_size_t), intent(in) :: counts(:), total
        logical :: fits
        fits = size(counts) == ranks_of(domain)
        if (fits) fits = all(counts >= 0) .and. sum(counts) == total
    end function

    ! Elements of a block, if there is one for each rank; 0 otherwise.
    function block_size(domain, total) result(count)
        type(fabricast_domain), intent(in) :: domain
        integer(c_size_t), intent(in) :: total
        integer(c_size_t) :: count, ranks
        ranks = ranks_of(domain)
        count = merge(total / ranks, 0_c_size_t, mod(total, ranks) == 0)
    end function

    function is_root(domain, root) result(is_this)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(in) :: root
        logical :: is_this
        integer(c_int32_t) :: rank
        is_this = fabricast_domain_rank(domain, rank) == FABRICAST_OK
        if (is_this) is_this = rank == root
    end function

    ! ------------------------------------------------------------- arrays by their addresses

    function all_gather(domain, own, own_size, all, all_size, type, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        type(c_ptr), intent(in) :: own, all
        integer(c_size_t), intent(in) :: own_size, all_size
        integer(c_int32_t), intent(in) :: type
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, target, optional :: counts(:)
        integer(c_int32_t) :: status
        type(c_ptr) :: to

        if (present(counts)) then
            to = if_fits(c_loc(counts), does_fit(domain, counts, all_size))
            status = c_all_gather_unequal(domain, own, own_size, all, to, c_null_ptr, type, timeout)
            return
        end if
        to = if_fits(all, own_size * ranks_of(domain) == all_size)
        status = c_all_gather(domain, own, to, own_size, type, timeout)
    end function

    function reduce_scatter(domain, blocks, blocks_size, own, own_size, type, op, timeout, counts) &
        result(status)
        type(fabricast_domain), intent(in) :: domain
        type(c_ptr), intent(in) :: blocks, own
        integer(c_size_t), intent(in) :: blocks_size, own_size
        integer(c_int32_t), intent(in) :: type, op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, target, optional :: counts(:)
        integer(c_int32_t) :: status
        logical :: fits
        integer(c_int32_t) :: rank

        if (present(counts)) then
            fits = does_fit(domain, counts, blocks_size)
            fits = fits .and. fabricast_domain_rank(domain, rank) == FABRICAST_OK
            if (fits) fits = counts(rank + 1) == own_size
            status = c_reduce_scatter_unequal(domain, blocks, own, if_fits(c_loc(counts), fits), &
                                              c_null_ptr, type, op, timeout)
            return
        end if
        fits = own_size * ranks_of(domain) == blocks_size
        status = c_reduce_scatter(domain, if_fits(blocks, fits), if_fits(own, fits), own_size, type, &
                                  op, timeout)
    end function

    function all_to_all(domain, send, send_size, receive, receive_size, type, timeout, send_counts, &
                        receive_counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        type(c_ptr), intent(in) :: send, receive
        integer(c_size_t), intent(in) :: send_size, receive_size
        integer(c_int32_t), intent(in) :: type
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, target, optional :: send_counts(:)
        integer(c_size_t), intent(in), contiguous, target, optional :: receive_counts(:)
        integer(c_int32_t) :: status
        type(c_ptr) :: from, to

        if (present(send_counts) .and. present(receive_counts)) then
            from = if_fits(c_loc(send_counts), does_fit(domain, send_counts, send_size))
            to = if_fits(c_loc(receive_counts), does_fit(domain, receive_counts, receive_size))
            status = c_all_to_all_unequal(domain, send, from, c_null_ptr, receive, to, c_null_ptr, &
                                          type, timeout)
            return
        end if
        to = if_fits(receive, send_size == receive_size .and. &
                     block_size(domain, send_size) * ranks_of(domain) == send_size .and. &
                     .not. (present(send_counts) .or. present(receive_counts)))
        status = c_all_to_all(domain, send, to, block_size(domain, send_size), type, timeout)
    end function

    function gather(domain, own, own_size, all, all_size, type, root, timeout, counts) &
        result(status)
        type(fabricast_domain), intent(in) :: domain
        type(c_ptr), intent(in) :: own, all
        integer(c_size_t), intent(in) :: own_size, all_size
        integer(c_int32_t), intent(in) :: type, root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, target, optional :: counts(:)
        integer(c_int32_t) :: status
        logical :: takes

        takes = is_root(domain, root)
        if (present(counts)) then
            if (takes) takes = does_fit(domain, counts, all_size)
            status = c_gather_unequal(domain, own, own_size, all, if_fits(c_loc(counts), takes), &
                                      c_null_ptr, type, root, timeout)
            return
        end if
        if (takes) takes = own_size * ranks_of(domain) == all_size
        status = c_gather(domain, own, if_fits(all, takes), own_size, type, root, timeout)
    end function

    function scatter(domain, blocks, blocks_size, own, own_size, type, root, timeout, counts) &
        result(status)
        type(fabricast_domain), intent(in) :: domain
        type(c_ptr), intent(in) :: blocks, own
        integer(c_size_t), intent(in) :: blocks_size, own_size
        integer(c_int32_t), intent(in) :: type, root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, target, optional :: counts(:)
        integer(c_int32_t) :: status
        logical :: gives

        gives = is_root(domain, root)
        if (present(counts)) then
            if (gives) gives = does_fit(domain, counts, blocks_size)
            status = c_scatter_unequal(domain, blocks, if_fits(c_loc(counts), gives), c_null_ptr, &
                                       own, own_size, type, root, timeout)
            return
        end if
        if (gives) gives = own_size * ranks_of(domain) == blocks_size
        status = c_scatter(domain, if_fits(blocks, gives), own, own_size, type, root, timeout)
    end function

    ! ---------------------------------------------------------------- real32

    function all_reduce_real32(domain, array, op, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_float), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_all_reduce(domain, c_null_ptr, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_F32, op, timeout)
    end function

    function reduce_real32(domain, array, op, root, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_float), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: op, root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_reduce(domain, c_null_ptr, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_F32, op, root, timeout)
    end function

    function broadcast_real32(domain, array, root, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_float), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_broadcast(domain, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_F32, root, timeout)
    end function

    function all_gather_real32(domain, own, all, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_float), intent(in), contiguous, target :: own(..)
        real(c_float), intent(inout), contiguous, target :: all(..)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = all_gather(domain, c_loc(own), size(own, kind=c_size_t), c_loc(all), &
                 size(all, kind=c_size_t), FABRICAST_TYPE_F32, timeout, counts)
    end function

    function reduce_scatter_real32(domain, blocks, own, op, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_float), intent(in), contiguous, target :: blocks(..)
        real(c_float), intent(inout), contiguous, target :: own(..)
        integer(c_int32_t), intent(in) :: op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = reduce_scatter(domain, c_loc(blocks), size(blocks, kind=c_size_t), &
                 c_loc(own), size(own, kind=c_size_t), FABRICAST_TYPE_F32, op, timeout, counts)
    end function

    function all_to_all_real32(domain, send, receive, timeout, send_counts, receive_counts) &
        result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_float), intent(in), contiguous, target :: send(..)
        real(c_float), intent(inout), contiguous, target :: receive(..)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: send_counts(:), receive_counts(:)
        integer(c_int32_t) :: status
        status = all_to_all(domain, c_loc(send), size(send, kind=c_size_t), c_loc(receive), &
                 size(receive, kind=c_size_t), FABRICAST_TYPE_F32, timeout, send_counts, &
                 receive_counts)
    end function

    function gather_real32(domain, own, all, root, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_float), intent(in), contiguous, target :: own(..)
        real(c_float), intent(inout), contiguous, target :: all(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = gather(domain, c_loc(own), size(own, kind=c_size_t), c_loc(all), size(all, &
                 kind=c_size_t), FABRICAST_TYPE_F32, root, timeout, counts)
    end function

    function scatter_real32(domain, blocks, own, root, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_float), intent(in), contiguous, target :: blocks(..)
        real(c_float), intent(inout), contiguous, target :: own(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = scatter(domain, c_loc(blocks), size(blocks, kind=c_size_t), c_loc(own), &
                 size(own, kind=c_size_t), FABRICAST_TYPE_F32, root, timeout, counts)
    end function

    ! ---------------------------------------------------------------- real64

    function all_reduce_real64(domain, array, op, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_double), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_all_reduce(domain, c_null_ptr, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_F64, op, timeout)
    end function

    function reduce_real64(domain, array, op, root, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_double), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: op, root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_reduce(domain, c_null_ptr, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_F64, op, root, timeout)
    end function

    function broadcast_real64(domain, array, root, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_double), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_broadcast(domain, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_F64, root, timeout)
    end function

    function all_gather_real64(domain, own, all, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_double), intent(in), contiguous, target :: own(..)
        real(c_double), intent(inout), contiguous, target :: all(..)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = all_gather(domain, c_loc(own), size(own, kind=c_size_t), c_loc(all), &
                 size(all, kind=c_size_t), FABRICAST_TYPE_F64, timeout, counts)
    end function

    function reduce_scatter_real64(domain, blocks, own, op, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_double), intent(in), contiguous, target :: blocks(..)
        real(c_double), intent(inout), contiguous, target :: own(..)
        integer(c_int32_t), intent(in) :: op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = reduce_scatter(domain, c_loc(blocks), size(blocks, kind=c_size_t), &
                 c_loc(own), size(own, kind=c_size_t), FABRICAST_TYPE_F64, op, timeout, counts)
    end function

    function all_to_all_real64(domain, send, receive, timeout, send_counts, receive_counts) &
        result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_double), intent(in), contiguous, target :: send(..)
        real(c_double), intent(inout), contiguous, target :: receive(..)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: send_counts(:), receive_counts(:)
        integer(c_int32_t) :: status
        status = all_to_all(domain, c_loc(send), size(send, kind=c_size_t), c_loc(receive), &
                 size(receive, kind=c_size_t), FABRICAST_TYPE_F64, timeout, send_counts, &
                 receive_counts)
    end function

    function gather_real64(domain, own, all, root, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_double), intent(in), contiguous, target :: own(..)
        real(c_double), intent(inout), contiguous, target :: all(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = gather(domain, c_loc(own), size(own, kind=c_size_t), c_loc(all), size(all, &
                 kind=c_size_t), FABRICAST_TYPE_F64, root, timeout, counts)
    end function

    function scatter_real64(domain, blocks, own, root, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        real(c_double), intent(in), contiguous, target :: blocks(..)
        real(c_double), intent(inout), contiguous, target :: own(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = scatter(domain, c_loc(blocks), size(blocks, kind=c_size_t), c_loc(own), &
                 size(own, kind=c_size_t), FABRICAST_TYPE_F64, root, timeout, counts)
    end function

    ! ----------------------------------------------------------------- int32

    function all_reduce_int32(domain, array, op, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_all_reduce(domain, c_null_ptr, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_I32, op, timeout)
    end function

    function reduce_int32(domain, array, op, root, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: op, root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_reduce(domain, c_null_ptr, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_I32, op, root, timeout)
    end function

    function broadcast_int32(domain, array, root, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_broadcast(domain, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_I32, root, timeout)
    end function

    function all_gather_int32(domain, own, all, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(in), contiguous, target :: own(..)
        integer(c_int32_t), intent(inout), contiguous, target :: all(..)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = all_gather(domain, c_loc(own), size(own, kind=c_size_t), c_loc(all), &
                 size(all, kind=c_size_t), FABRICAST_TYPE_I32, timeout, counts)
    end function

    function reduce_scatter_int32(domain, blocks, own, op, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(in), contiguous, target :: blocks(..)
        integer(c_int32_t), intent(inout), contiguous, target :: own(..)
        integer(c_int32_t), intent(in) :: op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = reduce_scatter(domain, c_loc(blocks), size(blocks, kind=c_size_t), &
                 c_loc(own), size(own, kind=c_size_t), FABRICAST_TYPE_I32, op, timeout, counts)
    end function

    function all_to_all_int32(domain, send, receive, timeout, send_counts, receive_counts) &
        result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(in), contiguous, target :: send(..)
        integer(c_int32_t), intent(inout), contiguous, target :: receive(..)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: send_counts(:), receive_counts(:)
        integer(c_int32_t) :: status
        status = all_to_all(domain, c_loc(send), size(send, kind=c_size_t), c_loc(receive), &
                 size(receive, kind=c_size_t), FABRICAST_TYPE_I32, timeout, send_counts, &
                 receive_counts)
    end function

    function gather_int32(domain, own, all, root, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(in), contiguous, target :: own(..)
        integer(c_int32_t), intent(inout), contiguous, target :: all(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = gather(domain, c_loc(own), size(own, kind=c_size_t), c_loc(all), size(all, &
                 kind=c_size_t), FABRICAST_TYPE_I32, root, timeout, counts)
    end function

    function scatter_int32(domain, blocks, own, root, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int32_t), intent(in), contiguous, target :: blocks(..)
        integer(c_int32_t), intent(inout), contiguous, target :: own(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = scatter(domain, c_loc(blocks), size(blocks, kind=c_size_t), c_loc(own), &
                 size(own, kind=c_size_t), FABRICAST_TYPE_I32, root, timeout, counts)
    end function

    ! ----------------------------------------------------------------- int64

    function all_reduce_int64(domain, array, op, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int64_t), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_all_reduce(domain, c_null_ptr, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_I64, op, timeout)
    end function

    function reduce_int64(domain, array, op, root, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int64_t), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: op, root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_reduce(domain, c_null_ptr, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_I64, op, root, timeout)
    end function

    function broadcast_int64(domain, array, root, timeout) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int64_t), intent(inout), contiguous, target :: array(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_int32_t) :: status
        status = c_broadcast(domain, c_loc(array), size(array, kind=c_size_t), &
                 FABRICAST_TYPE_I64, root, timeout)
    end function

    function all_gather_int64(domain, own, all, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int64_t), intent(in), contiguous, target :: own(..)
        integer(c_int64_t), intent(inout), contiguous, target :: all(..)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = all_gather(domain, c_loc(own), size(own, kind=c_size_t), c_loc(all), &
                 size(all, kind=c_size_t), FABRICAST_TYPE_I64, timeout, counts)
    end function

    function reduce_scatter_int64(domain, blocks, own, op, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int64_t), intent(in), contiguous, target :: blocks(..)
        integer(c_int64_t), intent(inout), contiguous, target :: own(..)
        integer(c_int32_t), intent(in) :: op
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = reduce_scatter(domain, c_loc(blocks), size(blocks, kind=c_size_t), &
                 c_loc(own), size(own, kind=c_size_t), FABRICAST_TYPE_I64, op, timeout, counts)
    end function

    function all_to_all_int64(domain, send, receive, timeout, send_counts, receive_counts) &
        result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int64_t), intent(in), contiguous, target :: send(..)
        integer(c_int64_t), intent(inout), contiguous, target :: receive(..)
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: send_counts(:), receive_counts(:)
        integer(c_int32_t) :: status
        status = all_to_all(domain, c_loc(send), size(send, kind=c_size_t), c_loc(receive), &
                 size(receive, kind=c_size_t), FABRICAST_TYPE_I64, timeout, send_counts, &
                 receive_counts)
    end function

    function gather_int64(domain, own, all, root, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int64_t), intent(in), contiguous, target :: own(..)
        integer(c_int64_t), intent(inout), contiguous, target :: all(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = gather(domain, c_loc(own), size(own, kind=c_size_t), c_loc(all), size(all, &
                 kind=c_size_t), FABRICAST_TYPE_I64, root, timeout, counts)
    end function

    function scatter_int64(domain, blocks, own, root, timeout, counts) result(status)
        type(fabricast_domain), intent(in) :: domain
        integer(c_int64_t), intent(in), contiguous, target :: blocks(..)
        integer(c_int64_t), intent(inout), contiguous, target :: own(..)
        integer(c_int32_t), intent(in) :: root
        integer(c_int64_t), intent(in) :: timeout
        integer(c_size_t), intent(in), contiguous, optional :: counts(:)
        integer(c_int32_t) :: status
        status = scatter(domain, c_loc(blocks), size(blocks, kind=c_size_t), c_loc(own), &
                 size(own, kind=c_size_t), FABRICAST_TYPE_I64, root, timeout, counts)
    end function
end module
